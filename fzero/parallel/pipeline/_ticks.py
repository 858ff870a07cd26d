"""Run a pipeline by one program for all ranks, tick by tick.

In each tick a rank runs its stages, and a shift sends on their outputs. The program uses only torch and fzero's
collectives. So it can be differentiated to any order and in both modes, runs under vmap, and is one graph on all ranks.
In the backward pass the transposes of the shifts send gradients back. It costs as much memory as GPipe, the residuals
of all micro-batches. Bubbles are computed too, and their results dropped.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import allow_in_graph, tensor_on
from fzero.axes import axis_index
from fzero.collectives import broadcast, ppermute
from fzero.parallel.pipeline._block_placement import BlockPlacement
from fzero.parallel.pipeline._model import MicroBatchCall
from fzero.parallel.pipeline._stage_functions import PipelineStages
from fzero.parallel.pipeline._value_specs import check_output
from fzero.parallel.schedules import PipelineSchedule

__all__ = ["outputs_by_ticks", "run_ticks"]


def run_ticks(stages: PipelineStages, blocks: list[Any], rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model on all micro-batches. The schedule sets which rank runs which stage, but not the order.

    Args:
        stages: the pipeline's stages.
        blocks: this rank's blocks by slot, with leaves `[1, ...]`.
        rest: all other parameters, full.

    Returns:
        The sums of the totals and of the weights on the rank of the last stage; zeros on the others.
    """
    is_last = _index_beside(stages.axis.name, (blocks, rest)) == stages.schedule.rank_of_stage[stages.last]
    total = weight = torch.zeros((), device="cpu")
    for call, x in _run_stages(stages, blocks, rest):
        params, x = _mask_gradients(is_last, rest), _mask_gradients(is_last, x)
        a, w = call.run(stages.model.run_last, params, x, call, stages.placement.depth)
        total = total + torch.where(is_last, a, torch.zeros_like(a))
        weight = weight + torch.where(is_last, w, torch.zeros_like(w))
    return total, weight


def outputs_by_ticks(stages: PipelineStages, blocks: list[Any], rest: Any) -> Any:
    """Run a model on all micro-batches, and return the concatenated results of `last` on all ranks."""
    last_rank = stages.schedule.rank_of_stage[stages.last]
    parts = [
        call.run(stages.model.run_outputs, rest, x, call, stages.placement.depth)
        for call, x in _run_stages(stages, blocks, rest)
    ]
    return broadcast(tree.map(lambda *xs: torch.cat(xs), *parts), stages.axis.name, source=last_rank)


def _run_stages(stages: PipelineStages, blocks: list[Any], rest: Any) -> Iterator[tuple[MicroBatchCall, Any]]:
    """Run all micro-batches through all stages, and yield each with the last block's output, valid on its rank."""
    schedule, placement, axis = stages.schedule, stages.placement, stages.axis.name
    count, last_stage = schedule.micro_batches, schedule.stages - 1
    rank = _index_beside(axis, (blocks, rest))
    own_stages = [_own_entry(column, rank) for column in _transpose_rows(placement.stage)]  # by chunk
    # by slot, the block's number
    own_blocks = [_own_entry(column, rank) for column in _transpose_rows(placement.blocks)]
    inputs: list[Any] = [None] * len(own_stages)
    for t in range(count + last_stage):
        first_call = stages.make_call(min(t, count - 1))
        first_x = first_call.run(stages.model.run_first, rest, first_call)  # on any rank
        check_output("first", first_x, first_x)
        outputs = []
        for slots, own_stage, x in zip(placement.chunks, own_stages, inputs, strict=True):
            m = t - own_stage
            in_bubble = (own_stage < 0) | (m < 0) | (m >= count)
            # in a bubble a stage runs on the first stage's input
            x = first_x if x is None else _select_leaves(in_bubble | (own_stage == 0), first_x, x)
            call, numbers = stages.make_call(m.clamp(0, count - 1)), [own_blocks[slot] for slot in slots]
            outputs.append(_run_chunk(stages, call, [blocks[slot] for slot in slots], numbers, x, ~in_bubble))
        if t >= last_stage:
            yield (
                stages.make_call(t - last_stage),
                outputs[placement.stage[schedule.rank_of_stage[last_stage]].index(last_stage)],
            )
        if t < count + last_stage - 1:
            inputs = _shift_outputs(outputs, schedule, placement, axis)


def _run_chunk(
    stages: PipelineStages,
    call: MicroBatchCall,
    blocks: Sequence[Any],
    numbers: Sequence[torch.Tensor],
    x: Any,
    is_active: torch.Tensor,
) -> Any:
    """Run the blocks of a chunk on a micro-batch; gradients pass where the chunk is active.

    Args:
        stages: the stages.
        call: the micro-batch.
        blocks: the parameters of each slot of the chunk.
        numbers: the number of each slot's block; -1 for a slot without a block, which returns its input.
        x: the input.
        is_active: whether this rank's stage has work now; a 0-d bool.
    """
    for block, number in zip(blocks, numbers, strict=True):
        is_used = is_active & (number >= 0)
        p, block_x = _mask_gradients(is_used, block), _mask_gradients(is_used, x)
        y = call.run(stages.model.run_block, p, block_x, number.clamp(min=0), call, True)
        check_output("block", x, y)
        x = _select_leaves(number < 0, x, y)
    return x


def _transpose_rows(rows: Sequence[Sequence[int | None]]) -> list[list[int]]:
    """Transpose rows; -1 stands for None."""
    return [[-1 if x is None else x for x in column] for column in zip(*rows, strict=True)]


def _index_beside(axis: str, values: Any) -> torch.Tensor:
    """Return this rank's index on the device of some tensors; under vmap one of each rank, which must lie there."""
    device = next((x.device for x in tree.tensors(values)), torch.device("cpu"))
    return axis_index(axis, device=device)


def _own_entry(column: list[int], rank: torch.Tensor) -> torch.Tensor:
    """Return this rank's entry of a list over all ranks, as a tensor. Under vmap it differs by rank."""
    return tensor_on(column, device=rank.device).index_select(0, rank.reshape(1)).squeeze(0)


def _select_leaves(condition: torch.Tensor, xs: Any, ys: Any) -> Any:
    return tree.map(lambda x, y: torch.where(condition, x, y), xs, ys)


class _MaskGradient(torch.autograd.Function):
    """The identity, with a zero gradient where a result is unused, even if the incoming gradient is not finite."""

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
def _mask_gradient(x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    return _MaskGradient.apply(x, condition)  # pyright: ignore[reportReturnType]


def _mask_gradients(condition: torch.Tensor, values: Any) -> Any:
    """Return a tree whose gradients are zero where the condition is false, whatever is computed from it."""

    def mask(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return _mask_gradient(x, condition) if is_float else x

    return tree.map(mask, values)


def _shift_outputs(outputs: list[Any], schedule: PipelineSchedule, placement: BlockPlacement, axis: str) -> list[Any]:
    """Send each chunk's output to the rank and chunk of the next stage."""
    chunk = {s: row.index(s) for row in placement.stage for s in row if s is not None}
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in range(schedule.stages - 1):
        pairs.setdefault((chunk[s], chunk[s + 1]), []).append(
            (schedule.rank_of_stage[s], schedule.rank_of_stage[s + 1])
        )
    inputs: list[Any] = [None] * len(outputs)
    for (source, target), perm in pairs.items():
        x = tree.map(lambda v, perm=perm: ppermute(v, axis, perm=perm), outputs[source])
        inputs[target] = x if inputs[target] is None else tree.map(torch.add, inputs[target], x)
    return inputs
