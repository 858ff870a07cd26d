"""A pipeline by its table: each rank does what its row says, and sends and receives between.

The forward pass of the loss makes the gradients, and its derivative hands them out. So residuals of a micro-batch die
in its backward pass, which comes as early as the schedule says; and a loss by a table is differentiated once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero import tree
from fzero._torch import group_of, is_tracing
from fzero.axes import is_lockstep, loss_scale_here
from fzero.collectives import StageMessages
from fzero.graph import loop
from fzero.parallel.pipeline._stages import Kinds, Params, Stages, kinds_of, probed
from fzero.parallel.schedules import Action, Value, makes, programs

__all__ = ["Recorded", "run_table", "seed_of"]

# A pipeline in a trace: each of a rank's stages runs once, forward and backward, as one turn of a loop.


Tensors = list[torch.Tensor]


class Recorded:
    """One rank's row of a schedule, written down for a graph that will run it.

    Attributes:
        stages: the pipeline's.
        params: this rank's parameters.
        scale: by which gradients are scaled in the backward passes, and until they are handed out.
        sums: by place of a parameter, the sums of its gradient: one for each of the rank's stages that may use it.
    """

    def __init__(self, stages: Stages, params: Params, scale: torch.Tensor | None) -> None:
        self.stages, self.params, self.scale = stages, params, scale
        self.sums: dict[int, Tensors] = {}

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Record a turn; returns the total and the weight."""
        tensors = [x.detach() for x in tensors]
        loop.aside()
        kinds = self.stages.call_of(0).run(probed, self.stages, self.params, tensors)
        loop.aside_ends()
        track = loop.RankSchedule(self.stages.schedule, self.stages.axis.binding)
        turn = loop.turn(self.stages.schedule.micro_batches)
        loop.needs(turn, loop.rank_schedule_number(track), tensors if self.scale is None else [*tensors, self.scale])
        shares: dict[int, list[_Sum]] = {place: [] for place in range(len(tensors))}
        totals: list[_Sum] = []
        for stage in self.stages.mine:
            totals += self._stage(stage, turn, kinds, tensors, shares)
        zero = torch.zeros((), dtype=kinds.total, device=kinds.device)
        totals = totals or [_without_share(zero, turn), _without_share(zero, turn)]
        for place, like in enumerate(tensors):
            missing = self._most(place) - len(shares[place])
            shares[place] += [_without_share(like, turn) for _ in range(missing)]
        # all ranks' loops return their sums in one order, whatever the order in which stages make them
        total, weight = [x.after() for x in totals]
        self.sums = {place: [x.after() for x in found] for place, found in shares.items()}
        return total, weight

    def handed_out(self, total: torch.Tensor) -> Tensors:
        """Return the gradients, times that of the total."""
        found, total = [], total if self.scale is None else total / self.scale
        for place, like in enumerate(self.params.tensors):
            first, *more = self.sums.pop(place)
            for other in more:
                first = first + other
            found.append((first * total.to(first.dtype)).to(like.dtype))
        return found

    def _most(self, place: int) -> int:
        """Return how many sums each rank has for a parameter: as many as the rank with most stages that use it."""
        if place < sum(self.params.sizes):
            return 1
        homes = [self.stages.schedule.home[s] for s in {0, self.stages.last}]
        return len(homes) - len(set(homes)) + 1

    def _stage(
        self, stage: int, turn: torch.Tensor, kinds: Kinds, tensors: Tensors, shares: dict[int, "list[_Sum]"]
    ) -> "list[_Sum]":
        """Record a stage, forward and backward; returns the sums of the total and the weight of the last one."""
        leaves, structure = tree.flatten(kinds.x)
        places = self.params.places(*self.stages.uses(stage))
        own = [tensors[i] for i in places]
        last = stage == self.stages.last
        loop.begins("F", stage)
        given = [] if stage == 0 else _arrivals("F", stage - 1, leaves, kinds.device)
        f = self.stages.function(stage, self.params, structure, self.stages.call_of(turn, in_a_turn=True))
        made, pull, aux = torch.func.vjp(f, own, given, has_aux=True)  # pyright: ignore[reportAssignmentType]
        if not last:
            loop.sent("F", stage, list(made))
        loop.begins("B", stage)
        cotangent: Any = seed_of(made, self.scale) if last else _arrivals("G", stage + 1, leaves, kinds.device)
        grads, x = pull(cotangent, retain_graph=False)
        if stage:
            loop.sent("G", stage, list(x))
        for place, g in zip(places, grads, strict=True):
            shares[place].append(_with_share(g, turn))
        return [_with_share(x, turn) for x in (made, aux)] if last else []


def seed_of(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the total with which a backward pass begins: in half precision small ones would vanish."""
    return torch.ones_like(total) if scale is None else torch.ones_like(total) * scale.to(total.dtype)


def _arrivals(kind: str, stage: int, leaves: Sequence[torch.Tensor], device: torch.device) -> Tensors:
    return [loop.received(kind, stage, i, list(x.shape), x.dtype, device) for i, x in enumerate(leaves)]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Sum(NamedTuple):
    """A sum over the micro-batches, before a turn and with the turn's share."""

    before: torch.Tensor
    now: torch.Tensor

    def after(self) -> torch.Tensor:
        """Hand the sum on, and return what the last turn makes of it."""
        return loop.sum_after(self.now, self.before)


def _with_share(share: torch.Tensor, turn: torch.Tensor) -> _Sum:
    before = loop.sum_before(share, turn, _wide(share))
    return _Sum(before, torch.add(before, share))


def _without_share(like: torch.Tensor, turn: torch.Tensor) -> _Sum:
    """Return a sum to which this rank adds nothing."""
    before = loop.sum_before(like, turn, _wide(like))
    return _Sum(before, before)


def run_table(stages: Stages, slots: Sequence[Any], rest: Any, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's row of a schedule.

    Args:
        stages: what to run.
        slots: this rank's blocks, by slot.
        rest: all other parameters.
        backward: whether the loss is about to be differentiated.

    Returns:
        The total and the weight; zeros on all ranks but that of the last stage.
    """
    params = Params.of(slots, rest)
    scale = loss_scale_here()
    row = Recorded(stages, params, scale) if is_tracing() else _Row(stages, params, backward, scale)
    return _Table.apply(row, *params.tensors)  # pyright: ignore[reportReturnType]


def _check_agreed(stages: Stages, device: torch.device) -> None:
    """Check once that the processes along the axis have one schedule: else they would wait for one another for ever.

    Raises:
        ValueError: on all of them, if they do not. Names two.
    """
    binding, table = stages.axis.binding, stages.schedule
    key = "agreed", binding.group
    if is_lockstep(binding.group) or key in stages.known:  # in lockstep who waits is named
        return
    text = repr((table.rows, table.home, stages.placement.blocks))
    mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    everyones = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(stages.axis.size)]
    dist.all_gather(everyones, torch.tensor([mine], device=device), group=group_of(binding.group))
    numbers = [x.item() for x in everyones]
    for place, number in enumerate(numbers):
        if number != numbers[0]:
            raise ValueError(
                f"fzero.pipeline: the ranks along {stages.axis.name!r} have different schedules: that at place {place} "
                f"differs from that at place 0. Here it is {table.name!r} of {table.micro_batches} micro-batches. Make "
                "it alike on all ranks: of durations that each measures, take one rank's"
            )
    stages.known[key] = None


class _Table(torch.autograd.Function):
    """The loss of a row. Its forward pass makes the gradients, which its backward pass scales and hands out."""

    @staticmethod
    def forward(row: "_Row | Recorded", *tensors: torch.Tensor) -> Any:
        return row.run(list(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.row = inputs[0]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor, weight: Any) -> Any:
        return (None, *ctx.row.handed_out(total))


@dataclass
class _Row:
    """One rank's row of a schedule, as it runs.

    Attributes:
        stages: the pipeline's.
        params: this rank's parameters.
        backward: whether to run backward passes, too.
        scale: by which gradients are scaled in the backward passes, and until they are handed out.
        grads: by place of a parameter, the gradient so far; None once they are handed out.
        pulls: by stage and micro-batch, its backward pass: what it holds is the residual.
        halves: by stage and micro-batch, the gradients that "I" has made for "W".
        sums: the total and the weight so far.
    """

    stages: Stages
    params: Params
    backward: bool
    scale: torch.Tensor | None = None
    grads: dict[int, torch.Tensor] | None = field(default_factory=dict)
    pulls: dict[tuple[int, int], Callable[..., Any]] = field(default_factory=dict)
    halves: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    sums: list[torch.Tensor] = field(default_factory=list)

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Do all instructions of the row; returns the total and the weight."""
        tensors, stages = [x.detach() for x in tensors], self.stages
        _check_agreed(stages, tensors[0].device)
        kinds = kinds_of(stages, self.params, tensors)
        leaves, structure = tree.flatten(kinds.x)
        messages = StageMessages(stages.schedule, stages.axis.binding, leaves, kinds.device)
        for instruction in programs(stages.schedule)[stages.axis.rank]:
            if isinstance(instruction.of, Action) and (self.backward or instruction.of.kind == "F"):
                self._act(instruction.of, tensors, messages, structure)
            elif self.backward or instruction.of.kind == "F":
                messages.execute(instruction)
        zero = torch.zeros((), dtype=kinds.total, device=kinds.device)
        total, weight = self.sums or (zero, zero.clone())
        return total, weight

    def handed_out(self, total: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients, times that of the total, each freed as it is handed out."""
        if self.grads is None:
            raise RuntimeError(
                "fzero.pipeline: the gradients of this loss were handed out; differentiate it once, or call it again"
            )
        grads, self.grads = self.grads, None
        total = total if self.scale is None else total / self.scale
        found: list[torch.Tensor | None] = []
        for place, like in enumerate(self.params.tensors):
            grad = grads.pop(place, None)
            found.append(None if grad is None else (grad * total.to(grad.dtype)).to(like.dtype))
        return found

    def _act(self, action: Action, tensors: Tensors, messages: StageMessages, structure: Any) -> None:
        """Run an action, and leave what it makes where the next stage, or a message, finds it."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "W":
            self._add(stage, self.halves.pop((stage, m)))
            return
        if action.kind == "F":
            given = messages.take(Value("F", stage - 1, m)) if stage else []
            f = self.stages.function(stage, self.params, structure, self.stages.call_of(m))
            made = self._forward(stage, m, f, [tensors[i] for i in self._places(stage)], given)
        else:
            given = messages.take(Value("G", stage + 1, m)) if stage < self.stages.last else []
            made = self._backward(stage, m, given, half=action.kind == "I")
        if made and (value := makes(action)):
            messages.put(value, made)

    def _places(self, stage: int) -> list[int]:
        return self.params.places(*self.stages.uses(stage))

    def _forward(self, stage: int, m: int, f: Callable[..., Any], own: Tensors, given: Tensors) -> Tensors:
        """Run a stage on a micro-batch; returns what goes to the next stage."""
        if self.backward:
            made, pull, aux = torch.func.vjp(f, own, given, has_aux=True)  # pyright: ignore[reportAssignmentType]
            self.pulls[stage, m] = pull
        else:
            made, aux = f(own, given)
        if stage < self.stages.last:
            return list(made)
        self.sums = [made, aux] if not self.sums else [x + y for x, y in zip(self.sums, (made, aux), strict=True)]
        return []

    def _backward(self, stage: int, m: int, given: Tensors, half: bool) -> Tensors:
        """Run a stage backward; returns the gradient of what it was given. Its residuals are freed."""
        cotangent: Any = seed_of(self.sums[0], self.scale) if stage == self.stages.last else given
        own, x = self.pulls.pop((stage, m))(cotangent, retain_graph=False)
        if half:
            self.halves[stage, m] = list(own)
        else:
            self._add(stage, list(own))
        return list(x)

    def _add(self, stage: int, found: Tensors) -> None:
        """Add gradients of a stage's parameters, in float32 at least."""
        assert self.grads is not None
        for place in self._places(stage):
            new = found.pop(0)
            if place in self.grads:
                self.grads[place] = self.grads[place].add_(new)
            else:
                wide = torch.promote_types(new.dtype, torch.float32)
                self.grads[place] = new.clone() if new.dtype == wide else new.to(wide)
