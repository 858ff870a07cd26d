"""The instructions by which ranks follow a schedule: actions, and the messages between them, in one global order.

All ranks send, receive and wait in one order of the whole pipeline. So no ranks wait for each other in a circle, even
if a message is sent only once its receiver asks for it.
"""

import functools
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fzero.parallel.schedules._actions import Action, Message, Value, action_inputs, action_output
from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule
from fzero.parallel.schedules._simulation import walk
from fzero.parallel.schedules._timing import Durations, time_schedule

__all__ = ["Instruction", "programs"]

_MAX_IN_FLIGHT = 4  # the most unfinished sends to one rank; before another one, the rank waits for the oldest


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank that follows a schedule.

    Attributes:
        kind: "compute" runs an action. "send" starts to send its result, and "wait_send" waits until the send has
            finished. "receive" starts to receive a message, for which the action that needs it waits.
        operand: the action, or the message.
    """

    kind: Literal["compute", "send", "wait_send", "receive"]
    operand: Action | Message


@functools.lru_cache(maxsize=64)
def programs(schedule: PipelineSchedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return each rank's instructions, for a schedule that can run.

    A message is received in the order of the whole pipeline, after the receiver's earlier actions. Its send has
    certainly finished when a message comes back that was sent after it was received. Then its memory can be freed.

    Example:
        >>> from fzero.parallel.schedules import schedule
        >>> [
        ...     f"{instruction.kind} {instruction.operand}"
        ...     for instruction in programs(schedule("gpipe", ranks=2, micro_batches=1))[0]
        ... ][:2]
        ['compute 0F0', "send Message(sender=0, receiver=1, kind='F', stage=0, micro_batch=0)"]
    """
    rows: list[list[Instruction]] = [[] for _ in range(schedule.ranks)]
    messages = {Value(m.kind, m.stage, m.micro_batch): m for m in schedule.messages}
    for rank, action in _actions_by_start(schedule):
        rows[rank].append(Instruction("compute", action))
        value = action_output(action)
        if value is not None and (message := messages.get(value)) is not None:
            rows[rank].append(Instruction("send", message))
            rows[message.receiver].append(Instruction("receive", message))
    return tuple([tuple(_insert_waits(rank, row, rows, schedule)) for rank, row in enumerate(rows)])


def _actions_by_start(schedule: PipelineSchedule) -> list[tuple[int, Action]]:
    """Return the actions of all ranks, sorted by the time at which they start."""
    timing = time_schedule(schedule, Durations.of(schedule.ranks, schedule.stages))
    position = {action: i for i, (_, action) in enumerate(walk(schedule))}
    rank = {action: r for r, row in enumerate(schedule.rows) for action in row}
    order = sorted(position, key=lambda action: (timing.start[action], position[action]))
    return [(rank[action], action) for action in order]


def _insert_waits(
    rank: int, row: list[Instruction], rows: list[list[Instruction]], schedule: PipelineSchedule
) -> list[Instruction]:
    """Insert waits for a rank's sends where they cost nothing, or at the latest at the end."""
    incoming = {value: m for m in schedule.messages if m.receiver == rank for value in [Value(*m[2:])]}
    receipts = {m: _received_before(m, rows[m.sender]) for m in incoming.values()}
    in_flight: dict[int, deque[Message]] = {}  # by receiver, the sends that were not waited for
    instructions: list[Instruction] = []
    for instruction in row:
        if isinstance(instruction.operand, Action):
            for value in action_inputs(instruction.operand, schedule.stages):
                message = incoming.get(value)
                if message is None:
                    continue
                queue = in_flight.get(message.sender, deque())
                while queue and queue[0] in receipts[message]:
                    instructions.append(Instruction("wait_send", queue.popleft()))
        if instruction.kind == "send":
            assert isinstance(instruction.operand, Message)
            queue = in_flight.setdefault(instruction.operand.receiver, deque())
            if len(queue) == _MAX_IN_FLIGHT:
                instructions.append(Instruction("wait_send", queue.popleft()))
            queue.append(instruction.operand)
        instructions.append(instruction)
    return instructions + [Instruction("wait_send", message) for queue in in_flight.values() for message in queue]


def _received_before(message: Message, row: list[Instruction]) -> set[Message]:
    """Return the messages that the sender of a message received and used before it sent that message."""
    incoming = {}
    for instruction in row:
        if instruction.kind == "receive" and isinstance(instruction.operand, Message):
            incoming[Value(*instruction.operand[2:])] = instruction.operand
    messages: set[Message] = set()
    for instruction in row:
        if instruction.operand == message:
            return messages
        if isinstance(instruction.operand, Action):
            messages.update(
                incoming[value] for value in action_inputs(instruction.operand, 1 << 30) if value in incoming
            )
    return messages
