"""The actions of a pipeline's ranks, and the values that they compute and need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    pass

__all__ = [
    "IN_FLIGHT_CHANGE",
    "KINDS",
    "Action",
    "Kind",
    "Message",
    "Value",
    "action_inputs",
    "action_output",
    "stages_on",
]

Kind = Literal["F", "B", "I", "W"]
# change of the number of passes in flight: residuals live until the weight half ends
IN_FLIGHT_CHANGE = {
    "F": 1,
    "B": -1,
    "I": 0,
    "W": -1,
}
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of a rank's work: the forward or backward pass of one pipeline stage for one micro-batch.

    It prints as in torch's tables: `2B0` is the backward pass of stage 2 for micro-batch 0.

    Attributes:
        kind: "F" for forward; "B" for a full backward pass, or one of its halves. "I" computes the gradient of the
            stage's input, and "W", at any later time, the gradient of its weights.
        stage: the pipeline stage, from 0.
        micro_batch: the micro-batch, from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        numbers = (self.stage, self.micro_batch)
        if self.kind not in KINDS or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(
                f"Action({self.kind!r}, {self.stage!r}, {self.micro_batch!r}): expected one of {', '.join(KINDS)}, a "
                "stage and a micro-batch, both ints from 0"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Value(NamedTuple):
    """A value that one action computes and another one needs.

    Attributes:
        kind: "F" for the output of a stage; "G" for the gradient of its input, which goes to the previous stage.
        stage: the stage that computes it.
        micro_batch: the micro-batch.
    """

    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """A value that one rank sends to another.

    Attributes:
        sender: the rank that computes it.
        receiver: the rank that needs it.
        kind: "F" for the output of a stage; "G" for the gradient of its input.
        stage: the stage that computes it: "F" goes to stage + 1, and "G" to stage - 1.
        micro_batch: the micro-batch.
    """

    sender: int
    receiver: int
    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


def action_output(action: Action) -> Value | None:
    """Return the value that an action computes for other actions; None for the weight half of a backward pass."""
    if action.kind == "W":
        return None
    return Value("F" if action.kind == "F" else "G", action.stage, action.micro_batch)


def stages_on(rank: int, rank_of_stage: Sequence[int]) -> list[int]:
    """List the pipeline stages that a rank holds, given the rank of each stage."""
    return [stage for stage, holder in enumerate(rank_of_stage) if holder == rank]


def action_inputs(action: Action, stages: int) -> tuple[Value, ...]:
    """Return the values that an action needs before it starts, in a pipeline of this many stages."""
    s, m = action.stage, action.micro_batch
    if action.kind == "F":
        return (Value("F", s - 1, m),) if s else ()
    if action.kind == "W":
        return (Value("G", s, m),)
    after = (Value("G", s + 1, m),) if s + 1 < stages else ()
    return (Value("F", s, m), *after)
