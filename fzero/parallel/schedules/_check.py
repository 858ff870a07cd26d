"""Whether a schedule can be run, and says the right thing: each action once, on its rank, in an order that goes on."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fzero.parallel.schedules._actions import KINDS, Action, Value, makes, needs

if TYPE_CHECKING:
    from fzero.parallel.schedules._schedule import Schedule

__all__ = ["WalkAction", "check", "walk"]

# A walk through a schedule in an order in which it can be run.


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


def check(schedule: "Schedule") -> None:
    """Check that a schedule is a whole train step, and that its ranks never wait for each other in a circle.

    Raises:
        ValueError: if a stage has no rank or a rank no stage. Also if an action is missing, stands twice, stands on
            another rank than its stage's, or is half a backward pass without the other. Also if ranks that follow
            their rows come to a point where nothing can go on. Names the actions.

    Example:
        >>> from fzero.parallel.schedules import schedule
        >>> check(schedule("1f1b", ranks=4, micro_batches=8))
    """
    _check_homes(schedule)
    _check_places(schedule)
    _check_whole(schedule)
    for _ in walk(schedule):
        pass


def _refuse(schedule: "Schedule", text: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {text}")


def _check_homes(schedule: "Schedule") -> None:
    if not schedule.home or not schedule.rows:
        raise _refuse(schedule, f"it has {schedule.ranks} ranks and {schedule.stages} stages: expected one of each")
    for stage, rank in enumerate(schedule.home):
        if type(rank) is not int or not 0 <= rank < schedule.ranks:
            raise _refuse(
                schedule, f"home[{stage}]={rank!r}: expected the rank that holds it, 0 to {schedule.ranks - 1}"
            )
    for rank in range(schedule.ranks):
        if rank not in schedule.home:
            raise _refuse(schedule, f"rank {rank} holds no stage: home={schedule.home} names those that hold one")


def _check_places(schedule: "Schedule") -> None:
    seen = Counter[Action]()
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            where = f"rank {rank}, place {place}"
            if not isinstance(action, Action):
                raise _refuse(schedule, f"{where}: {action!r} is no Action; Schedule.parse reads texts such as '0F1'")
            if action.stage >= schedule.stages:
                raise _refuse(schedule, f"{where}: {action} is of a stage without a rank; home has {schedule.stages}")
            if schedule.home[action.stage] != rank:
                raise _refuse(
                    schedule, f"{where}: {action} is of a stage that rank {schedule.home[action.stage]} holds"
                )
            seen[action] += 1
    twice = [action for action, n in seen.items() if n > 1]
    if twice:
        raise _refuse(schedule, f"{_listed(twice)} {'stands' if len(twice) == 1 else 'stand'} twice")


def _check_whole(schedule: "Schedule") -> None:
    there = {action for row in schedule.rows for action in row}
    count = schedule.micro_batches
    if count == 0:
        raise _refuse(schedule, "stage 0 runs no micro-batch forward")
    for stage in range(schedule.stages):
        for m in range(count):
            _check_micro_batch(schedule, there, stage, m)
    further = sorted((a for a in there if a.micro_batch >= count), key=str)
    if further:
        raise _refuse(schedule, f"{_listed(further)}: stage 0 runs micro-batches 0 to {count - 1} only")


def _check_micro_batch(schedule: "Schedule", there: set[Action], stage: int, m: int) -> None:
    forward, backward, inputs, weights = [Action(kind, stage, m) for kind in KINDS]
    if forward not in there:
        rank = schedule.home[stage]
        raise _refuse(
            schedule,
            f"{forward}, the forward pass of stage {stage} for micro-batch {m}, is missing on rank {rank}"
            + _torch_1f1b(schedule, there, stage),
        )
    halves = [a for a in (inputs, weights) if a in there]
    if backward in there and halves:
        raise _refuse(schedule, f"{backward} is the whole backward pass, and {_listed(halves)} stands beside it")
    if backward not in there and len(halves) < 2:
        wanted = f"{backward}, or {inputs} and {weights}," if not halves else (weights if inputs in there else inputs)
        beside = f", of which {_listed(halves)} is one half" if halves else ""
        raise _refuse(
            schedule,
            f"{wanted} of rank {schedule.home[stage]} is missing: the backward pass of stage {stage} for "
            f"micro-batch {m}{beside}",
        )


def _torch_1f1b(schedule: "Schedule", there: set[Action], stage: int) -> str:
    """Name the fault of torch 2.13's own table of 1F1B: the last rank's forwards are 1 to M, not 0 to M - 1."""
    forwards = {a.micro_batch for a in there if a.kind == "F" and a.stage == stage}
    if stage != schedule.stages - 1 or forwards != set(range(1, schedule.micro_batches + 1)):
        return ""
    return (
        f". It runs micro-batches 1 to {schedule.micro_batches} in place of 0 to {schedule.micro_batches - 1}, as "
        "torch 2.13's own table of 1F1B does (torch does not run it): use "
        "fzero.parallel.schedules.schedule('1f1b', ...)"
    )


def _listed(actions: list[Action]) -> str:
    some = ", ".join(map(str, actions[:4]))
    return some if len(actions) <= 4 else f"{some} and {len(actions) - 4} more"
