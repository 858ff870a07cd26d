"""Run a pipeline on the ranks of an axis: each rank by its row of the table, or all ranks by one program, tick by tick.

By the table, the forward pass of the loss computes the gradients, and the derivative of the loss returns them. So the
residuals of a micro-batch are freed in its backward pass, as early as the schedule allows. Such a loss can be
differentiated once.

By ticks, a rank runs its stages in each tick, and a shift sends on their outputs. The program uses only torch and
fzero's collectives. So it can be differentiated to any order and in both modes, runs under vmap, and is one graph on
all ranks. In the backward pass the transposes of the shifts send gradients back. It costs as much memory as GPipe, the
residuals of all micro-batches. Bubbles are computed too, and their results dropped.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fzero import tree
from fzero._torch import allow_in_graph, group_of, is_tracing
from fzero._torch.levels import derivatives
from fzero.axes import axis_index, current_loss_scale, is_lockstep, micro_batch
from fzero.collectives import StageMessages, broadcast, ppermute
from fzero.graph import loop
from fzero.parallel.pipeline._model import BlockPlacement, MicroBatchCall, Model
from fzero.parallel.pipeline._stage_functions import Params, Stages, ValueSpec, check_same_form, probe, value_spec_of
from fzero.parallel.schedules import Action, PipelineSchedule, Value, output_of, programs

__all__ = ["outputs_by_ticks", "run_on_ranks"]


def run_on_ranks(stages: Stages, slots: list[Any], rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a pipeline on the ranks of an axis.

    Each rank runs its row of the schedule's table if ranks run separate programs: on processes, in lockstep, and in a
    graph of fzero.jit. All ranks run one program, tick by tick, under vmap, in the graphs of other tracers, and for any
    derivative but a single gradient.
    """
    if not stages.axis.group or torch.compiler.is_dynamo_compiling():
        return run_ticks(stages, slots, rest)
    order = derivatives(tree.tensors([slots, rest]))
    if order is None or order > 1 or (is_tracing() and not (order and loop.records_pipelines())):
        return run_ticks(stages, slots, rest)
    if is_tracing() and isinstance(micro_batch(), torch.Tensor):
        raise loop.NotScannableError("the loss holds a pipeline, which has its own micro-batches")
    return run_table(stages, slots, rest, backward=order == 1)


# A pipeline in a trace: each of a rank's stages is recorded once, forward and backward, as one iteration of a loop.


class RowRecorder:
    """Records one rank's row of a schedule, for a graph that will run it.

    Attributes:
        stages: the pipeline's stages.
        params: this rank's parameters.
        scale: the loss scale, by which gradients are multiplied from the backward passes until they are returned.
        sums: by the index of a parameter, the sums of its gradient: one for each of the rank's stages that may use it.
    """

    def __init__(self, stages: Stages, params: Params, scale: torch.Tensor | None) -> None:
        self.stages, self.params, self.scale = stages, params, scale
        self.sums: dict[int, list[torch.Tensor]] = {}

    def run(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Record an iteration, and return the total and the weight."""
        tensors = [x.detach() for x in tensors]
        loop.begin_shapes_only()
        spec = self.stages.call_of(0).run(probe, self.stages, self.params, tensors)
        loop.end_shapes_only()
        rank_schedule = loop.RankSchedule(self.stages.schedule, self.stages.axis.binding)
        iteration = loop.iteration(self.stages.schedule.micro_batches)
        loop.mark_pipeline(
            iteration,
            loop.rank_schedule_number(rank_schedule),
            tensors if self.scale is None else [*tensors, self.scale],
        )
        shares: dict[int, list[loop.LoopSum]] = {index: [] for index in range(len(tensors))}
        totals: list[loop.LoopSum] = []
        for stage in self.stages.rank_stages:
            totals += self._stage(stage, iteration, spec, tensors, shares)
        zero = torch.zeros((), dtype=spec.total, device=spec.device)
        totals = totals or [_without_share(zero, iteration), _without_share(zero, iteration)]
        for index, like in enumerate(tensors):
            count = self._sum_count(index) - len(shares[index])
            shares[index] += [_without_share(like, iteration) for _ in range(count)]
        # all ranks' loops return their sums in the same order, in whatever order stages compute them
        total, weight = [x.after() for x in totals]
        self.sums = {index: [x.after() for x in sums] for index, sums in shares.items()}
        return total, weight

    def scaled_grads(self, total: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients, multiplied by the gradient of the total."""
        grads, total = [], total if self.scale is None else total / self.scale
        for index, like in enumerate(self.params.tensors):
            first, *more = self.sums.pop(index)
            for grad in more:
                first = first + grad
            grads.append((first * total.to(first.dtype)).to(like.dtype))
        return grads

    def _sum_count(self, index: int) -> int:
        """Return the number of sums for a parameter: that of the rank with the most stages that use it."""
        if index < sum(self.params.sizes):
            return 1
        end_ranks = [self.stages.schedule.rank_of_stage[s] for s in {0, self.stages.last}]
        return len(end_ranks) - len(set(end_ranks)) + 1

    def _stage(
        self,
        stage: int,
        iteration: torch.Tensor,
        spec: ValueSpec,
        tensors: list[torch.Tensor],
        shares: dict[int, list[loop.LoopSum]],
    ) -> list[loop.LoopSum]:
        """Record a stage forward and backward. For the last stage, return the sums of the total and the weight."""
        leaves, structure = tree.flatten(spec.x)
        indices = self.params.indices(*self.stages.uses(stage))
        weights = [tensors[i] for i in indices]
        last = stage == self.stages.last
        loop.begin_region("F", stage)
        inputs = [] if stage == 0 else _receive("F", stage - 1, leaves, spec.device)
        f = self.stages.function(stage, self.params, structure, self.stages.call_of(iteration, in_loop=True))
        outputs, vjp_fn, aux = torch.func.vjp(f, weights, inputs, has_aux=True)  # pyright: ignore[reportAssignmentType]
        if not last:
            loop.send("F", stage, list(outputs))
        loop.begin_region("B", stage)
        cotangent: Any = loss_cotangent(outputs, self.scale) if last else _receive("G", stage + 1, leaves, spec.device)
        grads, x = vjp_fn(cotangent, retain_graph=False)
        if stage:
            loop.send("G", stage, list(x))
        for index, g in zip(indices, grads, strict=True):
            shares[index].append(_with_share(g, iteration))
        return [_with_share(x, iteration) for x in (outputs, aux)] if last else []


def loss_cotangent(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the total, with which a backward pass begins, times the loss scale."""
    return torch.ones_like(total) if scale is None else torch.ones_like(total) * scale.to(total.dtype)


def _receive(kind: str, stage: int, leaves: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [loop.receive(kind, stage, i, list(x.shape), x.dtype, device) for i, x in enumerate(leaves)]


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _with_share(share: torch.Tensor, iteration: torch.Tensor) -> loop.LoopSum:
    return loop.LoopSum.with_share(share, iteration, _sum_dtype(share))


def _without_share(like: torch.Tensor, iteration: torch.Tensor) -> loop.LoopSum:
    return loop.LoopSum.without_share(like, iteration, _sum_dtype(like))


def run_table(stages: Stages, slots: Sequence[Any], rest: Any, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's row of a schedule.

    Args:
        stages: the pipeline's stages.
        slots: this rank's blocks, by slot.
        rest: all other parameters.
        backward: whether the loss will be differentiated.

    Returns:
        The total and the weight; zeros on all ranks except that of the last stage.
    """
    params = Params.of(slots, rest)
    scale = current_loss_scale()
    row = RowRecorder(stages, params, scale) if is_tracing() else _RowExecutor(stages, params, backward, scale)
    return _RowLoss.apply(row, *params.tensors)  # pyright: ignore[reportReturnType]


def _check_same_schedule(stages: Stages, device: torch.device) -> None:
    """Check once that the processes along the axis have the same schedule, since they would deadlock otherwise.

    Raises:
        ValueError: on all ranks, if two schedules differ. The message names the two ranks.
    """
    binding, table = stages.axis.binding, stages.schedule
    if is_lockstep(binding.group) or binding.group in stages.cache.checked_groups:
        return  # in lockstep, an error names the ranks that wait
    text = repr((table.rows, table.rank_of_stage, stages.placement.blocks))
    schedule_hash = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    hashes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(stages.axis.size)]
    dist.all_gather(hashes, torch.tensor([schedule_hash], device=device), group=group_of(binding.group))
    values = [x.item() for x in hashes]
    for rank, number in enumerate(values):
        if number != values[0]:
            raise ValueError(
                f"fzero.pipeline: the ranks along {stages.axis.name!r} have different schedules: rank {rank} "
                f"differs from rank 0. This rank has {table.name!r} of {table.micro_batches} micro-batches. Use the "
                "same schedule on all ranks: if it depends on measured durations, take those of one rank"
            )
    stages.cache.checked_groups.add(binding.group)


class _RowLoss(torch.autograd.Function):
    """The loss of a row. Its forward pass computes the gradients, and its backward pass scales and returns them."""

    @staticmethod
    def forward(row: "_RowExecutor | RowRecorder", *tensors: torch.Tensor) -> Any:
        return row.run(list(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.row = inputs[0]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, weight: Any) -> Any:
        return (None, *ctx.row.scaled_grads(total))


@dataclass
class _RowExecutor:
    """One rank's row of a schedule, as it runs.

    Attributes:
        stages: the pipeline's stages.
        params: this rank's parameters.
        backward: whether backward passes run too.
        scale: the loss scale, by which gradients are multiplied from the backward passes until they are returned.
        grads: by the index of a parameter, the gradient so far; None once the gradients are returned.
        vjp_fns: by stage and micro-batch, the function of the backward pass. It holds the residuals.
        deferred_grads: by stage and micro-batch, the gradients that "I" computed, which "W" will add.
        sums: the total and the weight so far.
    """

    stages: Stages
    params: Params
    backward: bool
    scale: torch.Tensor | None = None
    grads: dict[int, torch.Tensor] | None = field(default_factory=dict)
    vjp_fns: dict[tuple[int, int], Callable[..., Any]] = field(default_factory=dict)
    deferred_grads: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    sums: list[torch.Tensor] = field(default_factory=list)

    def run(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all instructions of the row, and return the total and the weight."""
        tensors, stages = [x.detach() for x in tensors], self.stages
        _check_same_schedule(stages, tensors[0].device)
        spec = value_spec_of(stages, self.params, tensors)
        leaves, structure = tree.flatten(spec.x)
        messages = StageMessages(stages.schedule, stages.axis.binding, leaves, spec.device)
        for instruction in programs(stages.schedule)[stages.axis.rank]:
            if isinstance(instruction.operand, Action) and (self.backward or instruction.operand.kind == "F"):
                self._act(instruction.operand, tensors, messages, structure)
            elif self.backward or instruction.operand.kind == "F":
                messages.execute(instruction)
        zero = torch.zeros((), dtype=spec.total, device=spec.device)
        total, weight = self.sums or (zero, zero.clone())
        return total, weight

    def scaled_grads(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, multiplied by the gradient of the total. Each is freed as it is returned."""
        if self.grads is None:
            raise RuntimeError(
                "fzero.pipeline: this loss was differentiated before; differentiate it once, or call it again"
            )
        grads, self.grads = self.grads, None
        total = total if self.scale is None else total / self.scale
        results: list[torch.Tensor | None] = []
        for index, like in enumerate(self.params.tensors):
            grad = grads.pop(index, None)
            results.append(None if grad is None else (grad * total.to(grad.dtype)).to(like.dtype))
        return results

    def _act(self, action: Action, tensors: list[torch.Tensor], messages: StageMessages, structure: Any) -> None:
        """Run an action, and pass its result to the next stage, or to a message."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "W":
            self._add(stage, self.deferred_grads.pop((stage, m)))
            return
        if action.kind == "F":
            inputs = messages.take(Value("F", stage - 1, m)) if stage else []
            f = self.stages.function(stage, self.params, structure, self.stages.call_of(m))
            outputs = self._forward(stage, m, f, [tensors[i] for i in self._indices(stage)], inputs)
        else:
            inputs = messages.take(Value("G", stage + 1, m)) if stage < self.stages.last else []
            outputs = self._backward(stage, m, inputs, is_input_only=action.kind == "I")
        if outputs and (value := output_of(action)):
            messages.put(value, outputs)

    def _indices(self, stage: int) -> list[int]:
        return self.params.indices(*self.stages.uses(stage))

    def _forward(
        self, stage: int, m: int, f: Callable[..., Any], weights: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a stage on a micro-batch, and return the output for the next stage."""
        if self.backward:
            outputs, vjp_fn, aux = torch.func.vjp(f, weights, inputs, has_aux=True)  # pyright: ignore[reportAssignmentType]
            self.vjp_fns[stage, m] = vjp_fn
        else:
            outputs, aux = f(weights, inputs)
        if stage < self.stages.last:
            return list(outputs)
        self.sums = [outputs, aux] if not self.sums else [x + y for x, y in zip(self.sums, (outputs, aux), strict=True)]
        return []

    def _backward(self, stage: int, m: int, inputs: list[torch.Tensor], is_input_only: bool) -> list[torch.Tensor]:
        """Run a stage backward, and return the gradient of its input. Its residuals are freed."""
        cotangent: Any = loss_cotangent(self.sums[0], self.scale) if stage == self.stages.last else inputs
        weight_grads, x = self.vjp_fns.pop((stage, m))(cotangent, retain_graph=False)
        if is_input_only:
            self.deferred_grads[stage, m] = list(weight_grads)
        else:
            self._add(stage, list(weight_grads))
        return list(x)

    def _add(self, stage: int, new_grads: list[torch.Tensor]) -> None:
        """Add gradients of a stage's parameters, at least in float32."""
        assert self.grads is not None
        for index in self._indices(stage):
            new = new_grads.pop(0)
            if index in self.grads:
                self.grads[index] = self.grads[index].add_(new)
            else:
                sum_dtype = torch.promote_types(new.dtype, torch.float32)
                self.grads[index] = new.clone() if new.dtype == sum_dtype else new.to(sum_dtype)


# One program for all ranks, tick by tick.


def run_ticks(stages: Stages, blocks: list[Any], rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model on all micro-batches. The schedule sets which rank runs which stage, but not the order.

    Args:
        stages: the pipeline's stages.
        blocks: this rank's blocks by slot, with leaves `[1, ...]`.
        rest: all other parameters, full.

    Returns:
        The sums of the totals and of the weights on the rank of the last stage; zeros on the others.
    """
    is_last = axis_index(stages.axis.name) == stages.schedule.rank_of_stage[stages.last]
    total = weight = torch.zeros((), device="cpu")
    for call, x in _run_stages(stages, blocks, rest):
        params, x = _mask_gradients(is_last, rest), _mask_gradients(is_last, x)
        a, w = call.run(stages.model.run_last, params, x, call, stages.placement.depth)
        total = total + torch.where(is_last, a, torch.zeros_like(a))
        weight = weight + torch.where(is_last, w, torch.zeros_like(w))
    return total, weight


def outputs_by_ticks(stages: Stages, blocks: list[Any], rest: Any) -> Any:
    """Run a model on all micro-batches, and return the concatenated results of `last` on all ranks."""
    last_rank = stages.schedule.rank_of_stage[stages.last]
    parts = [
        call.run(stages.model.run_outputs, rest, x, call, stages.placement.depth)
        for call, x in _run_stages(stages, blocks, rest)
    ]
    return broadcast(tree.map(lambda *xs: torch.cat(xs), *parts), stages.axis.name, source=last_rank)


def _run_stages(stages: Stages, blocks: list[Any], rest: Any) -> Iterator[tuple[MicroBatchCall, Any]]:
    """Run all micro-batches through all stages, and yield each with the last block's output, valid on its rank."""
    model, schedule, placement, axis = stages.model, stages.schedule, stages.placement, stages.axis.name
    call_of = stages.call_of
    count, last = schedule.micro_batches, schedule.stages - 1
    columns = [[-1 if s is None else s for s in column] for column in zip(*placement.stage, strict=True)]
    rank = axis_index(axis)
    stage = [_own_entry(column, rank) for column in columns]  # by chunk, this rank's stage
    number = [[-1 if b is None else b for b in column] for column in zip(*placement.blocks, strict=True)]
    index = [_own_entry(column, rank) for column in number]  # by slot, the number of this rank's block
    inputs: list[Any] = [None] * len(columns)
    for t in range(count + last):
        first_x = _first(model, rest, call_of(min(t, count - 1)))
        check_same_form("first", first_x, first_x)
        outputs = []
        for k, slots in enumerate(placement.chunks):
            m = t - stage[k]
            call = call_of(m.clamp(0, count - 1))
            is_active = (stage[k] >= 0) & (m >= 0) & (m < count)
            use_first = (stage[k] <= 0) | (m < 0) | (m >= count)  # in a bubble a stage runs on the first stage's input
            x = first_x if inputs[k] is None else _where(use_first, first_x, inputs[k])
            for slot in slots:
                is_used = is_active & (index[slot] >= 0)
                p, block_x = _mask_gradients(is_used, blocks[slot]), _mask_gradients(is_used, x)
                y = _block(model, p, block_x, index[slot], call)
                check_same_form("block", x, y)
                x = _where(index[slot] < 0, x, y)
            outputs.append(x)
        if t >= last:
            yield call_of(t - last), outputs[placement.stage[schedule.rank_of_stage[last]].index(last)]
        if t < count + last - 1:
            inputs = _shift(outputs, schedule, placement, axis)


def _own_entry(column: list[int], rank: torch.Tensor) -> torch.Tensor:
    """Return this rank's entry of a list over all ranks, as a tensor. Under vmap it differs by rank."""
    return torch.tensor(column, device=rank.device).index_select(0, rank.reshape(1)).squeeze(0)


def _first(model: Model, rest: Any, call: MicroBatchCall) -> Any:
    """Run the part before the blocks, on any rank."""
    return call.run(model.run_first, rest, call)


def _block(model: Model, p: Any, x: Any, index: torch.Tensor, call: MicroBatchCall) -> Any:
    return call.run(model.run_block, p, x, index.clamp(min=0), call, True)


def _where(condition: torch.Tensor, xs: Any, ys: Any) -> Any:
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


def _shift(outputs: list[Any], schedule: PipelineSchedule, placement: BlockPlacement, axis: str) -> list[Any]:
    """Send each chunk's output to the rank and chunk of the next stage."""
    chunk = {s: row.index(s) for row in placement.stage for s in row if s is not None}
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s in range(schedule.stages - 1):
        pairs.setdefault((chunk[s], chunk[s + 1]), []).append(
            (schedule.rank_of_stage[s], schedule.rank_of_stage[s + 1])
        )
    inputs: list[Any] = [None] * len(outputs)
    for (source, to), perm in pairs.items():
        x = tree.map(lambda v, perm=perm: ppermute(v, axis, perm=perm), outputs[source])
        inputs[to] = x if inputs[to] is None else tree.map(torch.add, inputs[to], x)
    return inputs
