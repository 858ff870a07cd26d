"""Run a pipeline on the ranks of an axis: each rank by its row of the table, or all ranks by one program, tick by tick.

By the table, the forward pass of the loss computes the gradients, and the derivative of the loss returns them. So the
residuals of a micro-batch are freed in its backward pass, as early as the schedule allows. Such a loss can be
differentiated once. `_ticks.py` describes the other program.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.levels import derivatives
from fzero.axes import current_loss_scale, micro_batch
from fzero.graph import loop
from fzero.parallel.pipeline._rank_executor import RankExecutor
from fzero.parallel.pipeline._rank_recorder import RankRecorder
from fzero.parallel.pipeline._stage_functions import FlatParams, PipelineStages
from fzero.parallel.pipeline._ticks import run_ticks

__all__ = ["run_on_ranks"]


def run_on_ranks(stages: PipelineStages, block_slots: list[Any], rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a pipeline on the ranks of an axis.

    Each rank runs its row of the schedule's table if ranks run separate programs: on processes, in lockstep, and in a
    graph of fzero.jit. All ranks run one program, tick by tick, under vmap, in the graphs of other tracers, and for any
    derivative but a single gradient.
    """
    if not stages.axis.group or torch.compiler.is_dynamo_compiling():
        return run_ticks(stages, block_slots, rest)
    order = derivatives(tree.tensors([block_slots, rest]))
    if order is None or order > 1 or (is_tracing() and not (order and loop.records_pipelines())):
        return run_ticks(stages, block_slots, rest)
    if is_tracing() and isinstance(micro_batch(), torch.Tensor):
        raise loop.NotScannableError("the loss holds a pipeline, which has its own micro-batches")
    return _run_table(stages, block_slots, rest, backward=order == 1)


def _run_table(
    stages: PipelineStages, block_slots: Sequence[Any], rest: Any, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's part of a schedule.

    Args:
        stages: the pipeline's stages.
        block_slots: this rank's blocks, by slot.
        rest: all other parameters.
        backward: whether the loss will be differentiated.

    Returns:
        The total and the weight; zeros on all ranks except that of the last stage.
    """
    params = FlatParams.of(block_slots, rest)
    scale = current_loss_scale()
    rank_run = RankRecorder(stages, params, scale) if is_tracing() else RankExecutor(stages, params, backward, scale)
    return _RankLoss.apply(rank_run, *params.tensors)  # pyright: ignore[reportReturnType]


class _RankLoss(torch.autograd.Function):
    """The loss of a rank. Its forward pass computes the gradients, and its backward pass scales and returns them."""

    @staticmethod
    def forward(rank_run: RankExecutor | RankRecorder, *tensors: torch.Tensor) -> Any:
        return rank_run.run(list(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rank_run = inputs[0]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, total_grad: torch.Tensor, _: Any) -> Any:
        return (None, *ctx.rank_run.scaled_grads(total_grad))
