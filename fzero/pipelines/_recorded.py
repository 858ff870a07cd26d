"""A pipeline in a trace: each of a rank's stages runs once, forward and backward, as one turn of a loop."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.graph import phases, turns
from fzero.pipelines._kinds import Kinds, probed
from fzero.pipelines._stages import Params, Stages

__all__ = ["Recorded", "seed_of"]

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
        phases.aside()
        kinds = self.stages.call_of(0).run(probed, self.stages, self.params, tensors)
        phases.aside_ends()
        track = phases.RankSchedule(self.stages.schedule, self.stages.axis.binding)
        turn = turns.turn(self.stages.schedule.micro_batches)
        phases.needs(
            turn, phases.rank_schedule_number(track), tensors if self.scale is None else [*tensors, self.scale]
        )
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
        phases.begins("F", stage)
        given = [] if stage == 0 else _arrivals("F", stage - 1, leaves, kinds.device)
        f = self.stages.function(stage, self.params, structure, self.stages.call_of(turn, in_a_turn=True))
        made, pull, aux = torch.func.vjp(f, own, given, has_aux=True)  # pyright: ignore[reportAssignmentType]
        if not last:
            phases.sent("F", stage, list(made))
        phases.begins("B", stage)
        cotangent: Any = seed_of(made, self.scale) if last else _arrivals("G", stage + 1, leaves, kinds.device)
        grads, x = pull(cotangent, retain_graph=False)
        if stage:
            phases.sent("G", stage, list(x))
        for place, g in zip(places, grads, strict=True):
            shares[place].append(_with_share(g, turn))
        return [_with_share(x, turn) for x in (made, aux)] if last else []


def seed_of(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of the total with which a backward pass begins: in half precision small ones would vanish."""
    return torch.ones_like(total) if scale is None else torch.ones_like(total) * scale.to(total.dtype)


def _arrivals(kind: str, stage: int, leaves: Sequence[torch.Tensor], device: torch.device) -> Tensors:
    return [phases.received(kind, stage, i, list(x.shape), x.dtype, device) for i, x in enumerate(leaves)]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Sum(NamedTuple):
    """A sum over the micro-batches, before a turn and with the turn's share."""

    before: torch.Tensor
    now: torch.Tensor

    def after(self) -> torch.Tensor:
        """Hand the sum on, and return what the last turn makes of it."""
        return turns.sum_after(self.now, self.before)


def _with_share(share: torch.Tensor, turn: torch.Tensor) -> _Sum:
    before = turns.sum_before(share, turn, _wide(share))
    return _Sum(before, torch.add(before, share))


def _without_share(like: torch.Tensor, turn: torch.Tensor) -> _Sum:
    """Return a sum to which this rank adds nothing."""
    before = turns.sum_before(like, turn, _wide(like))
    return _Sum(before, before)
