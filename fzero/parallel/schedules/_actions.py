"""What a rank of a pipeline does, what that makes, and what it needs."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["GROWTH", "KINDS", "Action", "Kind", "Message", "Value", "makes", "needs"]

Kind = Literal["F", "B", "I", "W"]
GROWTH = {"F": 1, "B": -1, "I": 0, "W": -1}  # of what is in flight: residuals live until the weights are done
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does at once: one pipeline stage, forward or backward, for one micro-batch.

    It prints as torch's tables have it: `2B0` is the backward pass of stage 2 for micro-batch 0.

    Attributes:
        kind: "F" forward; "B" the whole backward pass, or its halves: "I" makes the gradient of the stage's input,
            and "W", at any time after it, that of its weights.
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
                "stage and a micro-batch, which are ints from 0 on"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Value(NamedTuple):
    """What an action makes and another one needs.

    Attributes:
        kind: "F" the output of a stage; "G" the gradient of its input, which goes to the stage before.
        stage: the stage that makes it.
        micro_batch: the micro-batch.
    """

    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """A value that one rank sends to another.

    Attributes:
        sender: the rank that makes it.
        receiver: the rank that needs it.
        kind: "F" the output of a stage; "G" the gradient of its input.
        stage: the stage that makes it: "F" goes to stage + 1, and "G" to stage - 1.
        micro_batch: the micro-batch.
    """

    sender: int
    receiver: int
    kind: Literal["F", "G"]
    stage: int
    micro_batch: int


def makes(action: Action) -> Value | None:
    """Return what an action makes for others; nothing for the weight half of a backward pass."""
    if action.kind == "W":
        return None
    return Value("F" if action.kind == "F" else "G", action.stage, action.micro_batch)


def needs(action: Action, stages: int) -> tuple[Value, ...]:
    """Return what must be there before an action starts, in a pipeline of so many stages."""
    s, m = action.stage, action.micro_batch
    if action.kind == "F":
        return (Value("F", s - 1, m),) if s else ()
    if action.kind == "W":
        return (Value("G", s, m),)
    after = (Value("G", s + 1, m),) if s + 1 < stages else ()
    return (Value("F", s, m), *after)
