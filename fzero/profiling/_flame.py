"""A flame chart of one step: its passes, the functions in them, their lines, and their operations."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fzero.profiling._lines import Span

__all__ = ["bars", "draw"]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
ROWS = ("pass", "function", "line", "operation")
LEAST = 0.0005  # of the step: what is narrower is not seen


class Bar(NamedTuple):
    """A bar of the chart: its row, the first being the pass, its text, and its place in seconds."""

    row: int
    text: str
    start: float
    seconds: float


def bars(spans: Sequence[Span]) -> Iterator[Bar]:
    """Yield the bars of a chart. Neighbours of one name are one bar, if that above them is one."""
    for row in range(len(ROWS)):
        for names, group in groupby(spans, key=lambda s: _names(s)[: row + 1]):
            mine = list(group)
            yield Bar(row, names[-1], mine[0].start, sum([s.seconds for s in mine]))


def _names(span: Span) -> tuple[str, ...]:
    operation = span.name.partition("::")[2] or span.name
    return span.phase, span.function or "fzero", os.path.basename(span.line) or "-", operation


def draw(name: str, spans: Sequence[Span]) -> Any:
    """Draw a flame chart as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    of: list[dict[str, int]] = [{} for _ in ROWS]  # the colours of each row, by text
    whole = sum([s.seconds for s in spans]) or 1.0
    for bar in bars(spans):
        if bar.seconds < LEAST * whole:
            continue
        colour = COLOURS[of[bar.row].setdefault(bar.text, len(of[bar.row])) % len(COLOURS)]
        box = [(bar.start * 1e3, bar.seconds * 1e3)]
        axes.broken_barh(box, (-bar.row - 0.9, 0.9), facecolor=colour, edgecolor="white", linewidth=0.4)
        if len(bar.text) < 130 * bar.seconds / whole:
            middle = (bar.start + bar.seconds / 2) * 1e3
            axes.text(middle, -bar.row - 0.45, bar.text, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set(xlabel="ms of operations, one after the other", xlim=(0, whole * 1e3), ylim=(-len(ROWS), 0), title=name)
    axes.set_yticks([-row - 0.45 for row in range(len(ROWS))], ROWS)
    return figure
