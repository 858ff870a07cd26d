"""Choose how to run a pipeline: by its schedule on real ranks, or micro-batch by micro-batch under vmap."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.levels import derivatives
from fzero.axes.scope import micro_batch
from fzero.graph import turns
from fzero.pipelines._model import MicroBatchCall, Model
from fzero.pipelines._stages import Stages
from fzero.pipelines._table import run_table
from fzero.pipelines._ticks import run_ticks

__all__ = ["outputs_of_all", "run_all", "run_on"]

Pair = tuple[torch.Tensor, torch.Tensor]


def run_all(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> Pair:
    """Run a whole model on micro-batches, one after the other, where there are no ranks to share it."""

    def run(call: MicroBatchCall) -> Pair:
        return model.run_last(rest, _through(model, blocks, rest, call), call, len(blocks))

    totals, weights = zip(*[call.run(run, call) for call in calls], strict=True)
    return torch.stack(totals).sum(), torch.stack(weights).sum()


def outputs_of_all(model: Model, blocks: Sequence[Any], rest: Any, calls: Sequence[MicroBatchCall]) -> Any:
    """Run a whole model on micro-batches, and return what `last` makes of each, one after the other."""

    def run(call: MicroBatchCall) -> Any:
        return model.run_outputs(rest, _through(model, blocks, rest, call), call, len(blocks))

    return tree.map(lambda *xs: torch.cat(xs), *[call.run(run, call) for call in calls])


def _through(model: Model, blocks: Sequence[Any], rest: Any, call: MicroBatchCall) -> Any:
    """Run all blocks, and what comes before them."""
    x = model.run_first(rest, call)
    for index, p in enumerate(blocks):
        x = model.run_block(p, x, index, call, stacked=False)
    return x


def run_on(stages: Stages, slots: list[Any], rest: Any) -> Pair:
    """Run a pipeline on the ranks of an axis.

    By its table, where each rank has a program of its own: on processes, also in a graph of fzero.jit, and in lockstep.
    By ticks where ranks are a vmap, in graphs of other tracers, and for all derivatives but one gradient.
    """
    if not stages.axis.group or torch.compiler.is_dynamo_compiling():
        return run_ticks(stages, slots, rest)
    order = derivatives(tree.tensors([slots, rest]))
    if order is None or order > 1 or (is_tracing() and not (order and turns.pipelines_are_recorded())):
        return run_ticks(stages, slots, rest)
    if is_tracing() and isinstance(micro_batch(), torch.Tensor):
        raise turns.NotScannable("a pipeline is in the loss, with micro-batches of its own")
    return run_table(stages, slots, rest, backward=order == 1)
