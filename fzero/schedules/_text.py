"""A schedule drawn in text: ranks down, time across."""

from typing import TYPE_CHECKING

from fzero.schedules._actions import Action
from fzero.schedules._check import check
from fzero.schedules._timing import Durations, timed

if TYPE_CHECKING:
    from fzero.schedules._schedule import Schedule

__all__ = ["in_micro_batches", "text"]

COLUMNS = 120  # characters of a line; a longer schedule goes on below


def _title(schedule: "Schedule") -> str:
    """Name a schedule that can be run, with its counts, its efficiency where B = 2 F, and what is in flight."""
    timing = timed(schedule, Durations.of(schedule.ranks, schedule.stages))
    flying = ", ".join(in_micro_batches(schedule))
    counts = (
        f"{schedule.ranks} ranks"
        if schedule.ranks == schedule.stages
        else (f"{schedule.stages} stages on {schedule.ranks} ranks")
    )
    words = [f"{counts}, {schedule.micro_batches} micro-batches", f"efficiency {timing.efficiency:.3f}"]
    return f"{schedule.name}: {'; '.join([*words, f'in flight {flying}'])}"


def in_micro_batches(schedule: "Schedule") -> list[str]:
    """Return what each rank has in flight at most, in micro-batches: one counts as all stages of the rank together."""
    return [f"{schedule.in_flight(r) / schedule.home.count(r):.3g}" for r in range(schedule.ranks)]


def text(schedule: "Schedule") -> str:
    """Draw a schedule: a column is the time of a stage's forward pass, and a backward pass takes two.

    One that cannot be run is its rows, and the reason.
    """
    try:
        check(schedule)
    except ValueError as error:
        rows = [f"rank {r}  {' '.join(map(str, row))}" for r, row in enumerate(schedule.rows)]
        return "\n".join([f"{schedule.name}: it cannot be run", *rows, str(error)])
    short = schedule.ranks == schedule.stages
    cells = _cells(schedule, short)
    names = [f"rank {r}" for r in range(schedule.ranks)]
    wide, margin = max(len(c) for row in cells for c in row), max(map(len, names)) + 1
    columns = max(1, (COLUMNS - margin) // (wide + 1))
    blocks = [
        "\n".join(
            [
                f"{name:<{margin}}{''.join(f' {c:>{wide}}' for c in row[i : i + columns])}"
                for name, row in zip(names, cells, strict=True)
            ]
        )
        for i in range(0, len(cells[0]), columns)
    ]
    return f"{_title(schedule)}\n" + "\n\n".join(blocks)


def _cells(schedule: "Schedule", short: bool) -> list[list[str]]:
    """Return what stands in each column of each rank: an action, "--" while it goes on, or "." for a bubble."""
    share = schedule.ranks / schedule.stages
    timing = timed(schedule, Durations.of(schedule.ranks, schedule.stages))
    cells = [["."] * round(timing.makespan / share) for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        for action in row:
            first, last = round(timing.start[action] / share), round(timing.end[action] / share)
            cells[rank][first:last] = [_label(action, short), *["--"] * (last - first - 1)]
    return cells


def _label(action: Action, short: bool) -> str:
    return f"{action.kind}{action.micro_batch}" if short else str(action)
