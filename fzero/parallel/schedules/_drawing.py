"""A schedule as text and as a picture: ranks down, time across, an action a box."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero.parallel.schedules._actions import Action
from fzero.parallel.schedules._check import check
from fzero.parallel.schedules._timing import Durations, Timing, timed

if TYPE_CHECKING:
    from fzero.parallel.schedules._schedule import Schedule

__all__ = ["draw", "in_micro_batches", "text"]

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


# Schedules as a picture: ranks down, time across, an action a box, bubbles empty.
#
# of a rank's first stage and of its last one; stages between have colours between
COLOURS = {
    "F": ((0.68, 0.82, 0.95), (0.24, 0.49, 0.75)),
    "B": ((0.99, 0.84, 0.55), (0.90, 0.59, 0.13)),
    "I": ((0.98, 0.73, 0.59), (0.84, 0.38, 0.22)),
    "W": ((0.74, 0.88, 0.73), (0.35, 0.64, 0.40)),
}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input half", "W": "backward, weight half"}
# A schedule drawn in text: ranks down, time across.


WIDTH, ROW, LEAST, MOST = 11.0, 0.3, 0.09, 14.0  # inches: of a figure, of a rank, at least, and of all rows together
INK, GREY = "#24292f", "#6e7781"


def draw(schedules: "Sequence[Schedule]", timings: Sequence[Timing]) -> Any:
    """Draw schedules as a figure of matplotlib, one below the other, on one clock."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = sum(s.ranks for s in schedules)
    row = max(LEAST, min(ROW, MOST / ranks))
    heights = [row * s.ranks + 0.62 for s in schedules]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.75), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    span = max(t.makespan for t in timings)
    for axes, schedule, timing in zip(panels, schedules, timings, strict=True):
        _panel(axes, schedule, timing, span, row)
    panels[-1].set_xlabel("time, in the unit of the durations", fontsize=8.5, color=GREY)
    _legend(figure, schedules)
    return figure


def _panel(axes: Any, schedule: "Schedule", timing: Timing, span: float, row: float) -> None:
    scale = (WIDTH - 1.6) * 72 / span  # points of a unit of time
    size = max(4.5, min(8.0, row * 72 * 0.42))
    line = 0.6 if scale * min(d for a in timing.start if (d := timing.end[a] - timing.start[a])) > 3 else 0.0
    boxes = dict[tuple[int, Any], list[tuple[float, float]]]()
    for rank, actions in enumerate(schedule.rows):
        own = [s for s, r in enumerate(schedule.home) if r == rank]
        for action in actions:
            start, width = timing.start[action], timing.end[action] - timing.start[action]
            depth = own.index(action.stage) / (len(own) - 1) if len(own) > 1 else 0.0
            boxes.setdefault((rank, _colour(action, depth)), []).append((start, width))
            label = str(action.micro_batch)
            if width * scale > size * (0.62 * len(label) + 0.35):
                ink = "white" if depth > 0.6 else INK
                axes.text(start + width / 2, rank, label, ha="center", va="center", fontsize=size, color=ink)
    for (rank, colour), found in boxes.items():
        axes.broken_barh(
            found, (rank - 0.45, 0.9), facecolor=colour, edgecolor="white", linewidth=line, antialiased=line > 0
        )
    _frame(axes, schedule, timing, span, size)


def _frame(axes: Any, schedule: "Schedule", timing: Timing, span: float, size: float) -> None:
    peaks = in_micro_batches(schedule)
    every = max(1, schedule.ranks // 16)
    shown = range(0, schedule.ranks, every)
    axes.set_yticks(list(shown), [f"rank {r}" for r in shown], fontsize=8)
    axes.set(xlim=(0, span), ylim=(schedule.ranks - 0.45, -0.55))
    for rank in shown:
        axes.text(1.012, rank, peaks[rank], transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    place = {"xytext": (0, 6), "textcoords": "offset points", "xycoords": "axes fraction"}  # as high as the title
    axes.annotate("in flight", (1.012, 1.0), fontsize=8.5, color=GREY, **place)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(schedule.name, loc="left", fontsize=10, weight="bold", color=INK)
    words = (
        f"efficiency {timing.efficiency:.1%}, makespan {timing.makespan:g}, "
        f"{schedule.micro_batches} micro-batches, {len(schedule.messages):,} messages"
    )
    axes.set_title(words, loc="right", fontsize=8.5, color=GREY)


def _legend(figure: Any, schedules: "Sequence[Schedule]") -> None:
    from matplotlib.patches import Patch

    kinds = {a.kind for s in schedules for row in s.rows for a in row}
    patches = [Patch(color=COLOURS[k][0], label=WORDS[k]) for k in COLOURS if k in kinds]
    if any(s.stages > s.ranks for s in schedules):
        patches.append(Patch(color=COLOURS["F"][1], label="darker: a rank's later stages"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


def _colour(action: Action, depth: float) -> tuple[float, ...]:
    light, dark = COLOURS[action.kind]
    return tuple([a + (b - a) * depth for a, b in zip(light, dark, strict=True)])
