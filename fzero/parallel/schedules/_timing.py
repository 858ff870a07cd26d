"""When each action of a schedule starts and ends, by durations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fzero.parallel.schedules._actions import Action, Value, makes, needs
from fzero.parallel.schedules._check import walk

if TYPE_CHECKING:
    from fzero.parallel.schedules._schedule import Schedule

__all__ = ["Durations", "Timing", "timed"]


@dataclass(frozen=True)
class Timing:
    """When a schedule's actions run.

    Attributes:
        makespan: from the first start to the last end, in the unit of the durations given.
        busy: by rank, how long it computes.
        start: by action, when it starts.
        end: by action, when it ends.
    """

    makespan: float
    busy: tuple[float, ...]
    start: Mapping[Action, float] = field(repr=False)
    end: Mapping[Action, float] = field(repr=False)

    @property
    def efficiency(self) -> float:
        """Return the share of the ranks' time in which they compute: 1 without bubbles."""
        return sum(self.busy) / (len(self.busy) * self.makespan)


@dataclass(frozen=True)
class Durations:
    """How long actions and messages take.

    Attributes:
        kinds: by kind of action, for a stage of the mean weight.
        cost: by stage, how heavy it is.
        hop: of a message between ranks.
    """

    kinds: Mapping[str, float]
    cost: tuple[float, ...]
    hop: float

    @classmethod
    def of(
        cls,
        ranks: int,
        stages: int,
        forward: float = 1.0,
        backward: float = 2.0,
        weight: float = 1.0,
        hop: float = 0.0,
        cost: Sequence[float] | None = None,
    ) -> "Durations":
        """Check durations that a user gave, and divide a rank's share of the model by its stages.

        Raises:
            ValueError: if one is negative or not finite, the weight half takes longer than the whole backward pass,
                or there is not one cost for each stage.
        """
        given = {"forward": forward, "backward": backward, "weight": weight, "hop": hop}
        for name, value in given.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: expected a duration, a finite number from 0 on")
        if forward + backward == 0:
            raise ValueError("forward=0 and backward=0: a schedule in which nothing takes time has no efficiency")
        if weight > backward:
            raise ValueError(f"weight={weight!r} is more than backward={backward!r}, of which it is a part")
        costs = (1.0,) * stages if cost is None else tuple(cost)
        if len(costs) != stages:
            raise ValueError(f"cost has {len(costs)} numbers: expected one for each of the {stages} stages")
        if not all(isinstance(c, int | float) and math.isfinite(c) and c > 0 for c in costs):
            raise ValueError(f"cost={cost!r}: expected finite numbers above 0")
        share = ranks / stages
        kinds = {"F": forward * share, "B": backward * share, "I": (backward - weight) * share, "W": weight * share}
        return cls(kinds, costs, hop)

    def __getitem__(self, action: Action) -> float:
        """Return how long an action takes."""
        return self.kinds[action.kind] * self.cost[action.stage]


def timed(schedule: "Schedule", durations: Durations) -> Timing:
    """Run a schedule that can be run, by a clock for each rank."""
    there = dict[Value, float]()  # when a value is made
    clock, busy = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    start, end = dict[Action, float](), dict[Action, float]()
    for rank, action in walk(schedule):
        at = clock[rank]
        for value in needs(action, schedule.stages):
            at = max(at, there[value] + (durations.hop if schedule.home[value.stage] != rank else 0.0))
        start[action] = at
        end[action] = clock[rank] = at + durations[action]
        busy[rank] += durations[action]
        if (value := makes(action)) is not None:
            there[value] = end[action]
    return Timing(max(clock), tuple(busy), start, end)
