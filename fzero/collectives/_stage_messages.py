"""StageMessages: the messages between pipeline stages, in the order of a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.axes import Binding
from fzero.collectives._messages import start_receive, start_send
from fzero.collectives.gloo import PendingMessages, wait
from fzero.parallel.schedules import Instruction, Message, PipelineSchedule, Value

__all__ = ["StageMessages"]


@dataclass
class StageMessages:
    """The messages of one rank's pipeline stages: local values, outgoing messages and incoming messages.

    Attributes:
        schedule: the pipeline schedule, with the rank of each stage.
        binding: the binding of the axis along which the ranks lie.
        like: tensors of the shapes and dtypes of a value's leaves, on any device.
        device: the device for received tensors.
        ready: values that have arrived or were computed here, or the pending messages that carry them.
        in_flight: messages that are being sent.
    """

    schedule: PipelineSchedule
    binding: Binding
    like: Sequence[torch.Tensor]
    device: torch.device
    ready: dict[Value, list[Any]] = field(default_factory=dict)
    in_flight: dict[Message, list[PendingMessages]] = field(default_factory=dict)

    def put(self, value: Value, xs: Sequence[torch.Tensor]) -> None:
        """Store a stage's output for the next stage, or for the message that sends it."""
        self.ready[value] = list(xs)

    def take(self, value: Value) -> list[torch.Tensor]:
        """Return and remove another stage's output; wait for it if its message has not arrived."""
        xs = self.ready.pop(value)
        return [wait(x) if isinstance(x, PendingMessages) else x for x in xs]

    def execute(self, instruction: Instruction) -> None:
        """Start to send or to receive a message, or wait until a message is sent."""
        message = instruction.operand
        assert isinstance(message, Message)
        if instruction.kind == "receive":
            self.ready[_message_value(message)] = [
                start_receive(torch.empty_like(x, device=self.device), message.sender, tag, self.binding)
                for x, tag in zip(self.like, self._tags(message), strict=True)
            ]
        elif instruction.kind == "send":
            self.send(message)
        else:
            for pending in self.in_flight.pop(message):
                wait(pending)

    def send(self, message: Message) -> None:
        """Start to send a message, unless it was started already."""
        xs = self.ready.pop(_message_value(message), None)
        if xs is not None:
            tags = self._tags(message)
            self.in_flight[message] = [
                start_send(x, message.receiver, tag, self.binding) for x, tag in zip(xs, tags, strict=True)
            ]

    def _tags(self, message: Message) -> list[int]:
        """Return a tag for each leaf of a message; no other message has these tags."""
        number = message.stage * self.schedule.micro_batches + message.micro_batch
        first = (2 * number + (message.kind == "G")) * len(self.like)
        return list(range(first, first + len(self.like)))


def _message_value(message: Message) -> Value:
    return Value(message.kind, message.stage, message.micro_batch)
