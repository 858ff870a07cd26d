"""Phases: how a rank's stages of a pipeline are written down while a step is traced, and each runs once.

A rank of a pipeline is a loop over micro-batches (`fzero.graph.loop._scan`) whose turns are cut in phases: a forward
and a
backward one of each stage. By its row of a schedule the rank runs the phases of several turns between one another.
The operations here say where in a turn a phase begins, what it receives, and what it sends. All ranks along the axis
have such a loop, whose bodies differ; what it is given is the same on all.

They compute nothing: `fzero.graph.loop._trace` puts the loop in their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node, has_side_effect

from fzero.axes import Binding
from fzero.parallel.schedules import Action, Schedule

__all__ = [
    "MARKERS",
    "Phase",
    "RankSchedule",
    "aside",
    "aside_ends",
    "begins",
    "is_marker",
    "needs",
    "phases_of",
    "rank_schedule_number",
    "rank_schedule_of",
    "received",
    "sent",
]


@dataclass(frozen=True)
class RankSchedule:
    """What a rank follows: a schedule, at a place along an axis.

    Attributes:
        schedule: of all ranks.
        binding: of the axis: this rank's place, and the group of the ranks.
    """

    schedule: Schedule
    binding: Binding

    @property
    def stages(self) -> list[int]:
        """This rank's stages."""
        return [s for s, rank in enumerate(self.schedule.home) if rank == self.binding.rank]


_TRACKS: dict[RankSchedule, int] = {}


def rank_schedule_number(track: RankSchedule) -> int:
    """Return a number for a track, which a graph can carry: equal tracks have one."""
    return _TRACKS.setdefault(track, len(_TRACKS))


def rank_schedule_of(number: int) -> RankSchedule:
    """Return the track of a number."""
    return list(_TRACKS)[number]


class Phase(NamedTuple):
    """A part of a turn.

    Attributes:
        kind: "F" is a stage's forward pass. "I" is the part of its backward pass that makes the gradient of what the
            stage was given, and "W" all else of it.
        stage: which.
    """

    kind: str
    stage: int

    def precedes(self, other: "Phase") -> bool:
        """Return whether every schedule runs this one first, of the same turn."""
        if self.kind == "F":
            return other.kind != "F" or self.stage < other.stage
        on_the_way_back = other.kind == "I" and other.stage < self.stage
        return self.kind == "I" and (on_the_way_back or (other.kind == "W" and other.stage <= self.stage))


def phases_of(action: Action) -> list[Phase]:
    """List the phases of an action. A whole backward pass is both halves, of which the first can be sent at once."""
    return [Phase(kind, action.stage) for kind in ("IW" if action.kind == "B" else action.kind)]


def _never(*args: Any) -> torch.Tensor:
    raise AssertionError("an operation of a pipeline's loop ran outside a trace")


@torch.library.custom_op("fzero::needs", mutates_args=())
def needs(turn: torch.Tensor, track: int, xs: list[torch.Tensor]) -> torch.Tensor:
    """Say that a turn is one of a pipeline's loop, which is given these tensors whether it reads them or not."""
    return _never()


@torch.library.custom_op("fzero::begins", mutates_args=())
def begins(kind: str, stage: int) -> torch.Tensor:
    """Begin the forward ("F") or the backward ("B") pass of a stage."""
    return _never()


@torch.library.custom_op("fzero::received", mutates_args=())
def received(
    kind: str, stage: int, leaf: int, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return what a stage has made for this one: a leaf of its output ("F") or of its input's gradient ("G")."""
    return _never()


@torch.library.custom_op("fzero::sent", mutates_args=())
def sent(kind: str, stage: int, xs: list[torch.Tensor]) -> torch.Tensor:
    """Hand on what a stage has made: the leaves of its output ("F"), or of its input's gradient ("G")."""
    return _never()


@torch.library.custom_op("fzero::aside", mutates_args=())
def aside() -> torch.Tensor:
    """Begin what is run for its shapes alone, and does not belong to the step."""
    return _never()


@torch.library.custom_op("fzero::aside_ends", mutates_args=())
def aside_ends() -> torch.Tensor:
    """End what is run for its shapes alone."""
    return _never()


MARKERS = (needs, begins, received, sent, aside, aside_ends)
NEEDS, BEGINS, RECEIVED, SENT, ASIDE, ASIDE_ENDS = [op._opoverload for op in MARKERS]
for _marker in (NEEDS, BEGINS, SENT, ASIDE, ASIDE_ENDS):
    has_side_effect(_marker)  # nothing reads their results


def is_marker(node: Node) -> bool:
    """Return whether a node says where a phase begins, or what it sends or receives."""
    return node.target in (BEGINS, RECEIVED, SENT)


# ---------------------------------------------------------------- their shapes


def _nothing() -> torch.Tensor:
    return torch.empty((0,), dtype=torch.int64)


@needs.register_fake
def _(turn: torch.Tensor, track: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return _nothing()


@begins.register_fake
def _(kind: str, stage: int) -> torch.Tensor:
    return _nothing()


@received.register_fake
def _(kind: str, stage: int, leaf: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=device)


@sent.register_fake
def _(kind: str, stage: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return _nothing()


@aside.register_fake
def _() -> torch.Tensor:
    return _nothing()


@aside_ends.register_fake
def _() -> torch.Tensor:
    return _nothing()
