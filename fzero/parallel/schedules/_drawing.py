"""A schedule as text and as a picture: one row per rank, time from left to right, one bar per action."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fzero._report import new_figure
from fzero.parallel.schedules._actions import Action
from fzero.parallel.schedules._simulation import check
from fzero.parallel.schedules._timing import Durations, Timing, time_schedule

if TYPE_CHECKING:
    from fzero.parallel.schedules._pipeline_schedule import PipelineSchedule

__all__ = ["draw", "text"]

_LINE_LETTERS = 120  # characters per line; a longer schedule continues below


def _schedule_title(schedule: "PipelineSchedule") -> str:
    """Return the title of a schedule that can run: its counts, its efficiency if B = 2 F, and the passes in flight."""
    timing = time_schedule(schedule, Durations.of(schedule.ranks, schedule.stages))
    peaks = ", ".join(_in_flight_texts(schedule))
    counts = (
        f"{schedule.ranks} ranks"
        if schedule.ranks == schedule.stages
        else (f"{schedule.stages} stages on {schedule.ranks} ranks")
    )
    words = [f"{counts}, {schedule.micro_batches} micro-batches", f"efficiency {timing.efficiency:.3f}"]
    return f"{schedule.name}: {'; '.join([*words, f'in flight {peaks}'])}"


def _in_flight_texts(schedule: "PipelineSchedule") -> list[str]:
    """Return the most that each rank has in flight, in micro-batches: one is in flight in all stages of the rank."""
    return [f"{schedule.in_flight(r) / schedule.rank_of_stage.count(r):.3g}" for r in range(schedule.ranks)]


def text(schedule: "PipelineSchedule") -> str:
    """Draw a schedule as text. A column is the time of a stage's forward pass, and a backward pass takes two columns.

    For a schedule that cannot run, return its rows and the reason.
    """
    try:
        check(schedule)
    except ValueError as error:
        rows = [f"rank {r}  {' '.join(map(str, row))}" for r, row in enumerate(schedule.rows)]
        return "\n".join([f"{schedule.name}: it cannot run", *rows, str(error)])
    short = schedule.ranks == schedule.stages
    cells = _rank_columns(schedule, short)
    names = [f"rank {r}" for r in range(schedule.ranks)]
    width, margin = max(len(c) for row in cells for c in row), max(map(len, names)) + 1
    columns = max(1, (_LINE_LETTERS - margin) // (width + 1))
    blocks = [
        "\n".join(
            [
                f"{name:<{margin}}{''.join(f' {c:>{width}}' for c in row[i : i + columns])}"
                for name, row in zip(names, cells, strict=True)
            ]
        )
        for i in range(0, len(cells[0]), columns)
    ]
    return f"{_schedule_title(schedule)}\n" + "\n\n".join(blocks)


def _rank_columns(schedule: "PipelineSchedule", short: bool) -> list[list[str]]:
    """Return each rank's columns: an action, "--" while the action continues, or "." for a bubble."""
    share = schedule.ranks / schedule.stages
    timing = time_schedule(schedule, Durations.of(schedule.ranks, schedule.stages))
    cells = [["."] * round(timing.makespan / share) for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        for action in row:
            first, last = round(timing.start[action] / share), round(timing.end[action] / share)
            cells[rank][first:last] = [_action_label(action, short), *["--"] * (last - first - 1)]
    return cells


def _action_label(action: Action, short: bool) -> str:
    return f"{action.kind}{action.micro_batch}" if short else str(action)


# Schedules as a picture: one row per rank, time from left to right, one bar per action, empty bubbles.
#
# the colours of a rank's first stage and of its last one; the stages between them have colours between these
_COLOURS = {
    "F": ((0.68, 0.82, 0.95), (0.24, 0.49, 0.75)),
    "B": ((0.99, 0.84, 0.55), (0.90, 0.59, 0.13)),
    "I": ((0.98, 0.73, 0.59), (0.84, 0.38, 0.22)),
    "W": ((0.74, 0.88, 0.73), (0.35, 0.64, 0.40)),
}
_WORDS = {"F": "forward", "B": "backward", "I": "backward, input half", "W": "backward, weight half"}


# in inches: the width of a figure, the height of a rank, its least height, and the most of all ranks together
_WIDTH_INCHES, _ROW_INCHES, _MIN_ROW_INCHES, _MAX_HEIGHT_INCHES = 11.0, 0.3, 0.09, 14.0
_INK, _GREY = "#24292f", "#6e7781"


def draw(schedules: "Sequence[PipelineSchedule]", timings: Sequence[Timing]) -> Any:
    """Draw schedules as one matplotlib figure, one below the other, on the same time axis."""
    ranks = sum(s.ranks for s in schedules)
    row = max(_MIN_ROW_INCHES, min(_ROW_INCHES, _MAX_HEIGHT_INCHES / ranks))
    heights = [row * s.ranks + 0.62 for s in schedules]
    figure = new_figure(_WIDTH_INCHES, sum(heights) + 0.75)
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    span = max(t.makespan for t in timings)
    for axes, schedule, timing in zip(panels, schedules, timings, strict=True):
        _draw_panel(axes, schedule, timing, span, row)
    panels[-1].set_xlabel("time, in the unit of the durations", fontsize=8.5, color=_GREY)
    _draw_legend(figure, schedules)
    return figure


def _draw_panel(axes: Any, schedule: "PipelineSchedule", timing: Timing, span: float, row: float) -> None:
    """Draw one schedule into a panel: a bar for each action, in a row for each rank."""
    scale = (_WIDTH_INCHES - 1.6) * 72 / span  # points per unit of time
    size = max(4.5, min(8.0, row * 72 * 0.42))
    line = 0.6 if scale * min(d for a in timing.start if (d := timing.end[a] - timing.start[a])) > 3 else 0.0
    bars = dict[tuple[int, Any], list[tuple[float, float]]]()
    for rank, actions in enumerate(schedule.rows):
        stages = schedule.stages_on(rank)
        for action in actions:
            start, width = timing.start[action], timing.end[action] - timing.start[action]
            depth = stages.index(action.stage) / (len(stages) - 1) if len(stages) > 1 else 0.0
            bars.setdefault((rank, _action_colour(action, depth)), []).append((start, width))
            label = str(action.micro_batch)
            if width * scale > size * (0.62 * len(label) + 0.35):
                ink = "white" if depth > 0.6 else _INK
                axes.text(start + width / 2, rank, label, ha="center", va="center", fontsize=size, color=ink)
    for (rank, colour), spans in bars.items():
        axes.broken_barh(
            spans, (rank - 0.45, 0.9), facecolor=colour, edgecolor="white", linewidth=line, antialiased=line > 0
        )
    _draw_frame(axes, schedule, timing, span, size)


def _draw_frame(axes: Any, schedule: "PipelineSchedule", timing: Timing, span: float, size: float) -> None:
    """Draw the labels around a panel: ranks, the most in flight on each, and the schedule's numbers."""
    peaks = _in_flight_texts(schedule)
    step = max(1, schedule.ranks // 16)
    ticks = range(0, schedule.ranks, step)
    axes.set_yticks(list(ticks), [f"rank {r}" for r in ticks], fontsize=8)
    axes.set(xlim=(0, span), ylim=(schedule.ranks - 0.45, -0.55))
    for rank in ticks:
        axes.text(1.012, rank, peaks[rank], transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    offset = {"xytext": (0, 6), "textcoords": "offset points", "xycoords": "axes fraction"}  # at the title's height
    axes.annotate("in flight", (1.012, 1.0), fontsize=8.5, color=_GREY, **offset)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(schedule.name, loc="left", fontsize=10, weight="bold", color=_INK)
    words = (
        f"efficiency {timing.efficiency:.1%}, makespan {timing.makespan:g}, "
        f"{schedule.micro_batches} micro-batches, {len(schedule.messages):,} messages"
    )
    axes.set_title(words, loc="right", fontsize=8.5, color=_GREY)


def _draw_legend(figure: Any, schedules: "Sequence[PipelineSchedule]") -> None:
    from matplotlib.patches import Patch

    kinds = {a.kind for s in schedules for row in s.rows for a in row}
    patches = [Patch(color=_COLOURS[k][0], label=_WORDS[k]) for k in _COLOURS if k in kinds]
    if any(s.stages > s.ranks for s in schedules):
        patches.append(Patch(color=_COLOURS["F"][1], label="darker: a rank's later stages"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


def _action_colour(action: Action, depth: float) -> tuple[float, ...]:
    light, dark = _COLOURS[action.kind]
    return tuple([a + (b - a) * depth for a, b in zip(light, dark, strict=True)])
