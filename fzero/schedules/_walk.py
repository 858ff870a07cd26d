"""A walk through a schedule in an order in which it can be run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fzero.schedules._actions import Action, Value, makes, needs

if TYPE_CHECKING:
    from fzero.schedules._schedule import Schedule

__all__ = ["WalkAction", "walk"]


class WalkAction(NamedTuple):
    """An action of a walk, and the rank that runs it."""

    rank: int
    action: Action


def walk(schedule: "Schedule") -> Iterator[WalkAction]:
    """Yield each action after all that it needs and all that stands before it on its rank.

    Raises:
        ValueError: if nothing can go on. Names the actions that wait, and what each waits for.
    """
    at, made = [0] * schedule.ranks, set[Value]()
    waiting = dict[Value, list[int]]()  # ranks, by what they wait for
    going = list(range(schedule.ranks - 1, -1, -1))
    while going:
        rank = going.pop()
        row = schedule.rows[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            missing = next((v for v in needs(action, schedule.stages) if v not in made), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield WalkAction(rank, action)
            at[rank] += 1
            if (value := makes(action)) is not None:
                made.add(value)
                going += waiting.pop(value, [])
    if waiting:
        raise ValueError(_stuck(schedule, at, waiting))


def _stuck(schedule: "Schedule", at: list[int], waiting: dict[Value, list[int]]) -> str:
    words = []
    for rank, value in sorted((rank, value) for value, ranks in waiting.items() for rank in ranks):
        kind, stage, m = value
        what = f"the output of stage {stage}" if kind == "F" else f"the gradient that stage {stage} sends back"
        behind = f", which is rank {rank}'s own and comes later in its row" if schedule.home[stage] == rank else ""
        words.append(f"rank {rank} waits with {schedule.rows[rank][at[rank]]} for {what} for micro-batch {m}{behind}")
    return f"schedule {schedule.name!r}: nothing can go on: {'; '.join(words)}"
