"""Point-to-point messages between pipeline stages, sent and received as a schedule says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.axes.axis import Binding
from fzero.collectives.gloo import PendingMessages, wait
from fzero.collectives.messages import start_receive, start_send
from fzero.schedules import Message, Schedule
from fzero.schedules._actions import Value
from fzero.schedules._program import Instruction

__all__ = ["StageMessages"]


@dataclass
class StageMessages:
    """The messages of one rank: what its stages have made, what it sends, and what it receives.

    Attributes:
        schedule: which rank has which stage.
        binding: of the axis along which the ranks lie.
        forms: tensors of the shapes and dtypes of a value's leaves, on any device.
        device: where what arrives is to lie.
        ready: values that have arrived or were made here, or the messages that bring them.
        in_flight: messages that are being sent.
    """

    schedule: Schedule
    binding: Binding
    forms: Sequence[torch.Tensor]
    device: torch.device
    ready: dict[Value, list[Any]] = field(default_factory=dict)
    in_flight: dict[Message, list[PendingMessages]] = field(default_factory=dict)

    def put(self, value: Value, xs: Sequence[torch.Tensor]) -> None:
        """Keep what a stage has made for the next stage, or for the message that is sent."""
        self.ready[value] = list(xs)

    def take(self, value: Value) -> list[torch.Tensor]:
        """Return what another stage has made, waiting for it if it is on its way."""
        found = self.ready.pop(value)
        return [wait(x) if isinstance(x, PendingMessages) else x for x in found]

    def execute(self, instruction: Instruction) -> None:
        """Start to send or to receive a message, or wait until one has left."""
        message = instruction.of
        assert isinstance(message, Message)
        if instruction.kind == "receive":
            self.ready[_value(message)] = [
                start_receive(torch.empty_like(x, device=self.device), message.sender, tag, self.binding)
                for x, tag in zip(self.forms, self._tags(message), strict=True)
            ]
        elif instruction.kind == "send":
            self.send(message)
        else:
            for sent in self.in_flight.pop(message):
                wait(sent)

    def send(self, message: Message) -> None:
        """Start to send a message, if that has not been done."""
        xs = self.ready.pop(_value(message), None)
        if xs is not None:
            tags = self._tags(message)
            self.in_flight[message] = [
                start_send(x, message.receiver, tag, self.binding) for x, tag in zip(xs, tags, strict=True)
            ]

    def _tags(self, message: Message) -> list[int]:
        """Return a tag for each leaf, that no other message has."""
        number = message.stage * self.schedule.micro_batches + message.micro_batch
        first = (2 * number + (message.kind == "G")) * len(self.forms)
        return list(range(first, first + len(self.forms)))


def _value(message: Message) -> Value:
    return Value(message.kind, message.stage, message.micro_batch)
