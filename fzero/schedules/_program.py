"""What each rank does to follow a schedule: its actions, and the messages between them, in one order for all ranks.

All ranks send, receive and wait in one order of the whole pipeline. So none waits for another in a circle, not even
where a message leaves only when its receiver asks for it.
"""

import functools
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fzero.schedules._actions import Action, Message, Value, makes, needs
from fzero.schedules._schedule import Schedule
from fzero.schedules._timing import Durations, timed
from fzero.schedules._walk import walk

__all__ = ["Deed", "programs"]

ON_THE_WAY = 4  # messages to one rank that may be on their way; before a further one the oldest is waited for


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that a rank does to follow a schedule.

    Attributes:
        kind: "act" runs an action. "send" starts to send what it made, and "sent" waits until that has left.
            "receive" starts to receive a message: the action that needs it waits for it.
        of: the action, or the message.
    """

    kind: Literal["act", "send", "sent", "receive"]
    of: Action | Message


@functools.lru_cache(maxsize=64)
def programs(schedule: Schedule) -> tuple[tuple[Deed, ...], ...]:
    """Return each rank's deeds, for a schedule that can be run.

    A message is received in the order of the whole pipeline: as soon as what the receiver did meanwhile is done. It is
    known to have left when an answer comes that was sent after it had been received; then its memory can be let go.

    Example:
        >>> from fzero.schedules import schedule
        >>> [f"{deed.kind} {deed.of}" for deed in programs(schedule("gpipe", ranks=2, micro_batches=1))[0]][:2]
        ['act 0F0', "send Message(sender=0, receiver=1, kind='F', stage=0, micro_batch=0)"]
    """
    rows: list[list[Deed]] = [[] for _ in range(schedule.ranks)]
    sent = {Value(m.kind, m.stage, m.micro_batch): m for m in schedule.messages}
    for rank, action in _in_order(schedule):
        rows[rank].append(Deed("act", action))
        value = makes(action)
        if value is not None and (message := sent.get(value)) is not None:
            rows[rank].append(Deed("send", message))
            rows[message.receiver].append(Deed("receive", message))
    return tuple([tuple(_with_waits(rank, row, rows, schedule)) for rank, row in enumerate(rows)])


def _in_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """List the actions of all ranks by the time at which they start."""
    timing = timed(schedule, Durations.of(schedule.ranks, schedule.stages))
    place = {action: i for i, (_, action) in enumerate(walk(schedule))}
    rank = {action: r for r, row in enumerate(schedule.rows) for action in row}
    order = sorted(place, key=lambda action: (timing.start[action], place[action]))
    return [(rank[action], action) for action in order]


def _with_waits(rank: int, row: list[Deed], rows: list[list[Deed]], schedule: Schedule) -> list[Deed]:
    """Put the waits for what a rank sends where they cost nothing, or at the latest at the end."""
    arrives = {value: m for m in schedule.messages if m.receiver == rank for value in [Value(*m[2:])]}
    known = {m: _received_before(m, rows[m.sender]) for m in arrives.values()}
    leaving: dict[int, deque[Message]] = {}  # by receiver
    found: list[Deed] = []
    for deed in row:
        if isinstance(deed.of, Action):
            for value in needs(deed.of, schedule.stages):
                message = arrives.get(value)
                if message is None:
                    continue
                mine = leaving.get(message.sender, deque())
                while mine and mine[0] in known[message]:
                    found.append(Deed("sent", mine.popleft()))
        if deed.kind == "send":
            assert isinstance(deed.of, Message)
            mine = leaving.setdefault(deed.of.receiver, deque())
            if len(mine) == ON_THE_WAY:
                found.append(Deed("sent", mine.popleft()))
            mine.append(deed.of)
        found.append(deed)
    return found + [Deed("sent", message) for mine in leaving.values() for message in mine]


def _received_before(message: Message, row: list[Deed]) -> set[Message]:
    """List what the sender of a message has used before it: what has arrived, and left its own sender."""
    wanted = {}
    for deed in row:
        if deed.kind == "receive" and isinstance(deed.of, Message):
            wanted[Value(*deed.of[2:])] = deed.of
    used: set[Message] = set()
    for deed in row:
        if deed.of == message:
            return used
        if isinstance(deed.of, Action):
            used.update(wanted[value] for value in needs(deed.of, 1 << 30) if value in wanted)
    return used
