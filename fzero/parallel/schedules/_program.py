"""What each rank does to follow a schedule: its actions, and the messages between them, in one order for all ranks.

All ranks send, receive and wait in one order of the whole pipeline. So none waits for another in a circle, not even
where a message leaves only when its receiver asks for it.
"""

import functools
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fzero.parallel.schedules._actions import Action, Message, Value, makes, needs
from fzero.parallel.schedules._check import walk
from fzero.parallel.schedules._schedule import Schedule
from fzero.parallel.schedules._timing import Durations, timed

__all__ = ["Instruction", "programs"]

ON_THE_WAY = 4  # messages to one rank that may be on their way; before a further one the oldest is waited for


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that a rank does to follow a schedule.

    Attributes:
        kind: "act" runs an action. "send" starts to send what it made, and "sent" waits until that has left.
            "receive" starts to receive a message: the action that needs it waits for it.
        of: the action, or the message.
    """

    kind: Literal["act", "send", "sent", "receive"]
    of: Action | Message


@functools.lru_cache(maxsize=64)
def programs(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return each rank's instructions, for a schedule that can be run.

    A message is received in the order of the whole pipeline: as soon as what the receiver did meanwhile is done. It is
    known to have left when an answer comes that was sent after it had been received; then its memory can be let go.

    Example:
        >>> from fzero.parallel.schedules import schedule
        >>> [
        ...     f"{instruction.kind} {instruction.of}"
        ...     for instruction in programs(schedule("gpipe", ranks=2, micro_batches=1))[0]
        ... ][:2]
        ['act 0F0', "send Message(sender=0, receiver=1, kind='F', stage=0, micro_batch=0)"]
    """
    rows: list[list[Instruction]] = [[] for _ in range(schedule.ranks)]
    sent = {Value(m.kind, m.stage, m.micro_batch): m for m in schedule.messages}
    for rank, action in _in_order(schedule):
        rows[rank].append(Instruction("act", action))
        value = makes(action)
        if value is not None and (message := sent.get(value)) is not None:
            rows[rank].append(Instruction("send", message))
            rows[message.receiver].append(Instruction("receive", message))
    return tuple([tuple(_with_waits(rank, row, rows, schedule)) for rank, row in enumerate(rows)])


def _in_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """List the actions of all ranks by the time at which they start."""
    timing = timed(schedule, Durations.of(schedule.ranks, schedule.stages))
    place = {action: i for i, (_, action) in enumerate(walk(schedule))}
    rank = {action: r for r, row in enumerate(schedule.rows) for action in row}
    order = sorted(place, key=lambda action: (timing.start[action], place[action]))
    return [(rank[action], action) for action in order]


def _with_waits(
    rank: int, row: list[Instruction], rows: list[list[Instruction]], schedule: Schedule
) -> list[Instruction]:
    """Put the waits for what a rank sends where they cost nothing, or at the latest at the end."""
    arrives = {value: m for m in schedule.messages if m.receiver == rank for value in [Value(*m[2:])]}
    known = {m: _received_before(m, rows[m.sender]) for m in arrives.values()}
    in_flight: dict[int, deque[Message]] = {}  # by receiver
    found: list[Instruction] = []
    for instruction in row:
        if isinstance(instruction.of, Action):
            for value in needs(instruction.of, schedule.stages):
                message = arrives.get(value)
                if message is None:
                    continue
                mine = in_flight.get(message.sender, deque())
                while mine and mine[0] in known[message]:
                    found.append(Instruction("sent", mine.popleft()))
        if instruction.kind == "send":
            assert isinstance(instruction.of, Message)
            mine = in_flight.setdefault(instruction.of.receiver, deque())
            if len(mine) == ON_THE_WAY:
                found.append(Instruction("sent", mine.popleft()))
            mine.append(instruction.of)
        found.append(instruction)
    return found + [Instruction("sent", message) for mine in in_flight.values() for message in mine]


def _received_before(message: Message, row: list[Instruction]) -> set[Message]:
    """List what the sender of a message has used before it: what has arrived, and left its own sender."""
    wanted = {}
    for instruction in row:
        if instruction.kind == "receive" and isinstance(instruction.of, Message):
            wanted[Value(*instruction.of[2:])] = instruction.of
    used: set[Message] = set()
    for instruction in row:
        if instruction.of == message:
            return used
        if isinstance(instruction.of, Action):
            used.update(wanted[value] for value in needs(instruction.of, 1 << 30) if value in wanted)
    return used
