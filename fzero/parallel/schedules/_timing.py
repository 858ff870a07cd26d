"""The start and end of each action of a schedule, for given durations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fzero.parallel.schedules._actions import Action, Value, action_inputs, action_output

if TYPE_CHECKING:
    from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._simulation import walk

__all__ = ["Durations", "Timing", "time_schedule"]


@dataclass(frozen=True)
class Timing:
    """The start and end of each action of a schedule.

    Attributes:
        makespan: the time from the first start to the last end, in the unit of the durations.
        busy: by rank, the time in which it computes.
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
    """The durations of actions and messages.

    Attributes:
        kinds: by kind of action, its duration for a stage of mean cost.
        cost: by stage, its relative cost.
        latency: the duration of a message between ranks.
        sends_early: whether a full backward pass sends the gradient of its input before its weight half.
    """

    kinds: Mapping[str, float]
    cost: tuple[float, ...]
    latency: float
    sends_early: bool = False

    @classmethod
    def of(
        cls,
        ranks: int,
        stages: int,
        forward: float = 1.0,
        backward: float = 2.0,
        weight: float = 1.0,
        latency: float = 0.0,
        cost: Sequence[float] | None = None,
    ) -> "Durations":
        """Check a user's durations, and divide a rank's share of the model by its stages.

        Raises:
            ValueError: if a duration is negative or not finite, if the weight half takes longer than the full backward
                pass, or if there is not one cost per stage.
        """
        durations = {"forward": forward, "backward": backward, "weight": weight, "latency": latency}
        for name, value in durations.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: expected a duration, a finite number that is not negative")
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
        return cls(kinds, costs, latency)

    def __getitem__(self, action: Action) -> float:
        """Return the duration of an action."""
        return self.kinds[action.kind] * self.cost[action.stage]

    def until_output(self, action: Action) -> float:
        """Return the time from the start of an action until it has computed its output."""
        half = action.kind == "B" and self.sends_early
        return self.kinds["I" if half else action.kind] * self.cost[action.stage]


def time_schedule(schedule: "PipelineSchedule", durations: Durations) -> Timing:
    """Simulate a schedule that can run, with one clock per rank."""
    value_times = dict[Value, float]()  # by value, the time at which it is computed
    clock, busy = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    start, end = dict[Action, float](), dict[Action, float]()
    for rank, action in walk(schedule):
        start_time = clock[rank]
        for value in action_inputs(action, schedule.stages):
            start_time = max(
                start_time,
                value_times[value] + (durations.latency if schedule.rank_of_stage[value.stage] != rank else 0.0),
            )
        start[action] = start_time
        end[action] = clock[rank] = start_time + durations[action]
        busy[rank] += durations[action]
        if (value := action_output(action)) is not None:
            value_times[value] = start_time + durations.until_output(action)
    return Timing(max(clock), tuple(busy), start, end)
