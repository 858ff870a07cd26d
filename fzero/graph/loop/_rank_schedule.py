"""The schedule of a pipeline's rank, as the loop over micro-batches that the rank runs.

An iteration has a forward and a backward region for each of the rank's stages. The rank interleaves the regions of
several iterations, in the order of its row of the schedule.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fzero._registry import Registry
from fzero.axes import Binding
from fzero.parallel.schedules import Action, PipelineSchedule

__all__ = ["LoopRegion", "RankSchedule", "action_regions", "find_rank_schedule", "rank_schedule_id"]


@dataclass(frozen=True)
class RankSchedule:
    """A pipeline schedule and the rank that runs its row of it.

    Attributes:
        schedule: the schedule of all ranks.
        binding: the binding of the pipeline's axis: this rank's index along it, and the group of its ranks.
    """

    schedule: PipelineSchedule
    binding: Binding

    @property
    def stages(self) -> list[int]:
        """The pipeline stages on this rank."""
        return self.schedule.stages_on(self.binding.rank)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs a backward pass as two actions: the gradient of the input, and the rest."""
        return any(action.kind == "W" for row in self.schedule.rows for action in row)


_RANK_SCHEDULES = Registry[RankSchedule]()


def rank_schedule_id(rank_schedule: RankSchedule) -> int:
    """Return the id of a rank's schedule, which a graph can carry; equal schedules have the same id."""
    return _RANK_SCHEDULES.id_of(rank_schedule)


def find_rank_schedule(schedule_id: int) -> RankSchedule:
    """Return the rank's schedule that has this id."""
    return _RANK_SCHEDULES.value(schedule_id)


class LoopRegion(NamedTuple):
    """A part of an iteration.

    Attributes:
        kind: "F" is a stage's forward pass. "I" is the part of its backward pass that computes the gradient of the
            stage's input, and "W" is the rest of its backward pass.
        stage: the pipeline stage.
    """

    kind: str
    stage: int

    def precedes(self, other: "LoopRegion") -> bool:
        """Return whether every schedule runs this region before the other one of the same iteration."""
        if self.kind == "F":
            return other.kind != "F" or self.stage < other.stage
        is_earlier_stage = other.kind == "I" and other.stage < self.stage
        return self.kind == "I" and (is_earlier_stage or (other.kind == "W" and other.stage <= self.stage))


def action_regions(action: Action) -> list[LoopRegion]:
    """List the regions of an action. A full backward pass has two; the result of the first can be sent at once."""
    return [LoopRegion(kind, action.stage) for kind in ("IW" if action.kind == "B" else action.kind)]
