"""Walk through the actions of a schedule in an order in which they can run, and check that there is one."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fzero._tracebacks import api_boundary
from fzero.parallel.schedules._actions import KINDS, Action, Value, action_inputs, action_output

if TYPE_CHECKING:
    from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule

__all__ = ["check", "walk"]


class _RankAction(NamedTuple):
    """An action of a walk, and the rank that runs it."""

    rank: int
    action: Action


def walk(schedule: "PipelineSchedule") -> Iterator[_RankAction]:
    """Yield each action after all values that it needs, and after all earlier actions of its rank.

    Raises:
        ValueError: if no rank can continue. The message names the waiting actions, and what each waits for.
    """
    positions = [0] * schedule.ranks
    values = set[Value]()
    waiters = dict[Value, list[int]]()  # by value, the ranks that wait for it
    runnable = list(range(schedule.ranks - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        row = schedule.rows[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            next_input = next((v for v in action_inputs(action, schedule.stages) if v not in values), None)
            if next_input is not None:
                waiters.setdefault(next_input, []).append(rank)
                break
            yield _RankAction(rank, action)
            positions[rank] += 1
            if (value := action_output(action)) is not None:
                values.add(value)
                runnable += waiters.pop(value, [])
    if waiters:
        raise ValueError(_deadlock_message(schedule, positions, waiters))


def _deadlock_message(schedule: "PipelineSchedule", positions: list[int], waiters: dict[Value, list[int]]) -> str:
    words = []
    for rank, value in sorted((rank, value) for value, ranks in waiters.items() for rank in ranks):
        kind, stage, m = value
        label = f"the output of stage {stage}" if kind == "F" else f"the gradient that stage {stage} sends back"
        hint = (
            f", which is rank {rank}'s own and comes later in its row" if schedule.rank_of_stage[stage] == rank else ""
        )
        words.append(
            f"rank {rank} waits with {schedule.rows[rank][positions[rank]]} for {label} for micro-batch {m}{hint}"
        )
    return f"schedule {schedule.name!r}: no rank can continue: {'; '.join(words)}"


@api_boundary
def check(schedule: "PipelineSchedule") -> None:
    """Check that a schedule is a complete train step, and that its ranks never wait for each other in a circle.

    Raises:
        ValueError: if a stage has no rank, or a rank has no stage. Also if an action is missing, appears twice, is on
            another rank than its stage, or is half a backward pass without the other half. Also if ranks that follow
            their rows reach a point where none can continue. The message names the actions.

    Example:
        >>> from fzero.parallel.schedules import schedule
        >>> check(schedule("1f1b", ranks=4, micro_batches=8))
    """
    _check_ranks(schedule)
    _check_positions(schedule)
    _check_complete(schedule)
    for _ in walk(schedule):
        pass


def _schedule_error(schedule: "PipelineSchedule", text: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {text}")


def _check_ranks(schedule: "PipelineSchedule") -> None:
    """Raise an error if a stage has no rank, or a rank no stage."""
    if not schedule.rank_of_stage or not schedule.rows:
        raise _schedule_error(
            schedule, f"it has {schedule.ranks} ranks and {schedule.stages} stages: expected one of each"
        )
    for stage, rank in enumerate(schedule.rank_of_stage):
        if type(rank) is not int or not 0 <= rank < schedule.ranks:
            raise _schedule_error(
                schedule, f"rank_of_stage[{stage}]={rank!r}: expected the rank that holds it, 0 to {schedule.ranks - 1}"
            )
    for rank in range(schedule.ranks):
        if rank not in schedule.rank_of_stage:
            raise _schedule_error(
                schedule,
                f"rank {rank} holds no stage: rank_of_stage={schedule.rank_of_stage} lists the ranks of the stages",
            )


def _check_positions(schedule: "PipelineSchedule") -> None:
    """Raise an error for an action that stands on a rank without its stage, or twice."""
    counts = Counter[Action]()
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            label = f"rank {rank}, position {position}"
            if not isinstance(action, Action):
                raise _schedule_error(
                    schedule, f"{label}: {action!r} is not an Action; PipelineSchedule.parse reads texts such as '0F1'"
                )
            if action.stage >= schedule.stages:
                raise _schedule_error(
                    schedule, f"{label}: {action} has a stage without a rank; rank_of_stage has {schedule.stages}"
                )
            if schedule.rank_of_stage[action.stage] != rank:
                raise _schedule_error(
                    schedule, f"{label}: {action} has a stage that rank {schedule.rank_of_stage[action.stage]} holds"
                )
            counts[action] += 1
    duplicates = [action for action, n in counts.items() if n > 1]
    if duplicates:
        raise _schedule_error(
            schedule, f"{_join_actions(duplicates)} {'appears' if len(duplicates) == 1 else 'appear'} twice"
        )


def _check_complete(schedule: "PipelineSchedule") -> None:
    actions = {action for row in schedule.rows for action in row}
    count = schedule.micro_batches
    if count == 0:
        raise _schedule_error(schedule, "stage 0 runs no micro-batch forward")
    for stage in range(schedule.stages):
        for m in range(count):
            _check_micro_batch(schedule, actions, stage, m)
    extra = sorted((a for a in actions if a.micro_batch >= count), key=str)
    if extra:
        raise _schedule_error(schedule, f"{_join_actions(extra)}: stage 0 runs micro-batches 0 to {count - 1} only")


def _check_micro_batch(schedule: "PipelineSchedule", actions: set[Action], stage: int, m: int) -> None:
    """Raise an error if a pass of a micro-batch is missing, or the full backward pass stands beside a half."""
    forward, backward, inputs, weights = [Action(kind, stage, m) for kind in KINDS]
    if forward not in actions:
        rank = schedule.rank_of_stage[stage]
        raise _schedule_error(
            schedule,
            f"{forward}, the forward pass of stage {stage} for micro-batch {m}, is missing on rank {rank}"
            + _torch_1f1b_fault(schedule, actions, stage),
        )
    halves = [a for a in (inputs, weights) if a in actions]
    if backward in actions and halves:
        raise _schedule_error(
            schedule, f"{backward} is the full backward pass, but {_join_actions(halves)} is there too"
        )
    if backward not in actions and len(halves) < 2:
        absent, hint = f"{backward}, or {inputs} and {weights},", ""
        if halves:
            absent = weights if inputs in actions else inputs
            hint = f", of which {_join_actions(halves)} is one half"
        raise _schedule_error(
            schedule,
            f"{absent} of rank {schedule.rank_of_stage[stage]} is missing: the backward pass of stage {stage} for "
            f"micro-batch {m}{hint}",
        )


def _torch_1f1b_fault(schedule: "PipelineSchedule", actions: set[Action], stage: int) -> str:
    """Describe the fault of torch 2.13's own table of 1F1B: the last rank's forwards are 1 to M, not 0 to M - 1."""
    forwards = {a.micro_batch for a in actions if a.kind == "F" and a.stage == stage}
    if stage != schedule.stages - 1 or forwards != set(range(1, schedule.micro_batches + 1)):
        return ""
    return (
        f". It runs micro-batches 1 to {schedule.micro_batches} in place of 0 to {schedule.micro_batches - 1}, as "
        "torch 2.13's own table of 1F1B does (torch does not run it): use "
        "fzero.parallel.schedules.schedule('1f1b', ...)"
    )


def _join_actions(actions: list[Action]) -> str:
    text = ", ".join(map(str, actions[:4]))
    return text if len(actions) <= 4 else f"{text} and {len(actions) - 4} more"
