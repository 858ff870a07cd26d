"""A pipeline as one program of all ranks, tick by tick: each rank runs its stages, and a shift hands on what they made.

It is torch and fzero's collectives alone, so it differentiates to any order and in both directions, runs where ranks
are a vmap, and is one graph on all ranks. In the backward pass the shifts' transposes send gradients back. Its cost is
GPipe's, residuals of all micro-batches, and bubbles are computed: on what has no use, and is not counted.
"""

from collections.abc import Iterator
from typing import Any

import torch

from fzero import tree
from fzero._torch import allow_in_graph
from fzero.axes import axis_index
from fzero.collectives import broadcast, ppermute
from fzero.parallel.pipeline._model import MicroBatchCall, Model, Placement
from fzero.parallel.pipeline._stages import Stages, check_handed_on
from fzero.parallel.schedules import Schedule

__all__ = ["outputs_by_ticks", "run_ticks"]


def run_ticks(stages: Stages, blocks: list[Any], rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model on all micro-batches, its stages where a schedule has them; its order does not matter.

    Args:
        stages: what to run.
        blocks: this rank's, by slot: leaves `[1, ...]`.
        rest: all other parameters, whole.

    Returns:
        The sum of the totals and of the weights, on the rank of the last stage; zeros on the others.
    """
    here = axis_index(stages.axis.name) == stages.schedule.home[stages.last]
    total = weight = torch.zeros(())
    for call, x in _through(stages, blocks, rest):
        own, x = _only_where(here, rest), _only_where(here, x)
        a, w = call.run(stages.model.run_last, own, x, call, stages.placement.depth)
        total = total + torch.where(here, a, torch.zeros_like(a))
        weight = weight + torch.where(here, w, torch.zeros_like(w))
    return total, weight


def outputs_by_ticks(stages: Stages, blocks: list[Any], rest: Any) -> Any:
    """Run a model on all micro-batches, and return what `last` makes of each, one after the other, on all ranks."""
    home = stages.schedule.home[stages.last]
    parts = [
        call.run(stages.model.run_outputs, rest, x, call, stages.placement.depth)
        for call, x in _through(stages, blocks, rest)
    ]
    return broadcast(tree.map(lambda *xs: torch.cat(xs), *parts), stages.axis.name, source=home)


def _through(stages: Stages, blocks: list[Any], rest: Any) -> Iterator[tuple[MicroBatchCall, Any]]:
    """Run all micro-batches through all stages; yields each with what the last block makes, on its rank."""
    model, schedule, placement, axis = stages.model, stages.schedule, stages.placement, stages.axis.name
    call_of = stages.call_of
    count, last = schedule.micro_batches, schedule.stages - 1
    columns = [[-1 if s is None else s for s in column] for column in zip(*placement.stage, strict=True)]
    me = axis_index(axis)
    stage = [_of(column, me) for column in columns]  # by chunk, the stage that this rank has there
    number = [[-1 if b is None else b for b in column] for column in zip(*placement.blocks, strict=True)]
    index = [_of(column, me) for column in number]  # by slot, the block that it has there
    arrived: list[Any] = [None] * len(columns)
    for t in range(count + last):
        fresh = model_first(model, rest, call_of(min(t, count - 1)))
        check_handed_on("first", fresh, fresh)
        made = []
        for k, slots in enumerate(placement.chunks):
            m = t - stage[k]
            call = call_of(m.clamp(0, count - 1))
            runs = (stage[k] >= 0) & (m >= 0) & (m < count)
            begins = (stage[k] <= 0) | (m < 0) | (m >= count)  # in a bubble a stage runs on what is at hand
            x = fresh if arrived[k] is None else _where(begins, fresh, arrived[k])
            for slot in slots:
                used = runs & (index[slot] >= 0)
                p, given = _only_where(used, blocks[slot]), _only_where(used, x)
                y = _block(model, p, given, index[slot], call)
                check_handed_on("block", x, y)
                x = _where(index[slot] < 0, x, y)
            made.append(x)
        if t >= last:
            yield call_of(t - last), made[placement.stage[schedule.home[last]].index(last)]
        if t < count + last - 1:
            arrived = _handed_on(made, schedule, placement, axis)


def _of(column: list[int], me: torch.Tensor) -> torch.Tensor:
    """Return this rank's number of those of all ranks, as a tensor: in a vmap it differs by rank."""
    return torch.tensor(column).index_select(0, me.reshape(1)).squeeze(0)


def model_first(model: Model, rest: Any, call: MicroBatchCall) -> Any:
    """Run what comes before the blocks, on any rank."""
    return call.run(model.run_first, rest, call)


def _block(model: Model, p: Any, x: Any, index: torch.Tensor, call: MicroBatchCall) -> Any:
    return call.run(model.run_block, p, x, index.clamp(min=0), call, True)


def _where(condition: torch.Tensor, xs: Any, ys: Any) -> Any:
    return tree.map(lambda x, y: torch.where(condition, x, y), xs, ys)


class _OnlyWhere(torch.autograd.Function):
    """The identity, whose gradient is zero on ranks whose results have no use: there it may be 0 times infinity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (condition,) = ctx.saved_tensors
        return torch.where(condition, grad, torch.zeros_like(grad)), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        (condition,) = ctx.saved_tensors
        return torch.where(condition, tangent, torch.zeros_like(tangent))


@allow_in_graph
def _identity_where(x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    return _OnlyWhere.apply(x, condition)  # pyright: ignore[reportReturnType]


def _only_where(condition: torch.Tensor, values: Any) -> Any:
    """Return a tree whose gradients are zero where the condition is false, whatever is computed of it."""

    def only(x: Any) -> Any:
        tracked = isinstance(x, torch.Tensor) and x.is_floating_point()
        return _identity_where(x, condition) if tracked else x

    return tree.map(only, values)


def _handed_on(made: list[Any], schedule: Schedule, placement: Placement, axis: str) -> list[Any]:
    """Hand each chunk of a rank what the stage before it made, wherever that is."""
    chunk = {s: row.index(s) for row in placement.stage for s in row if s is not None}
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in range(schedule.stages - 1):
        pairs.setdefault((chunk[s], chunk[s + 1]), []).append((schedule.home[s], schedule.home[s + 1]))
    arrived: list[Any] = [None] * len(made)
    for (source, to), perm in pairs.items():
        x = tree.map(lambda v, perm=perm: ppermute(v, axis, perm=perm), made[source])
        arrived[to] = x if arrived[to] is None else tree.map(torch.add, arrived[to], x)
    return arrived
