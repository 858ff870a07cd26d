"""A flame chart of one step: its passes, the functions in them, their lines, and their operations."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fzero.profiling._lines import Span

__all__ = ["bars", "colours", "draw", "label"]

PASSES = {"forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b"}
FUNCTIONS = ("#b279a2", "#72b7b2", "#eeca3b", "#e45756", "#9d755d")
OPERATIONS = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9", "#ff9d98", "#bab0ac")
OTHERS = "#dddddd"
ROWS = ("pass", "function", "line", "operation")
LEAST = 0.0005  # of the step: what is narrower is not seen
LETTERS = 170  # that fit into the whole width


class Bar(NamedTuple):
    """A bar of the chart: its row, its name after the names above it, and its place in seconds. Row 0 is the pass."""

    row: int
    names: tuple[str, ...]
    start: float
    seconds: float

    @property
    def text(self) -> str:
        """Its own name."""
        return self.names[-1]


def bars(spans: Sequence[Span]) -> Iterator[Bar]:
    """Yield the bars of a chart. Neighbours of one name are one bar, if that above them is one."""
    for row in range(len(ROWS)):
        for names, group in groupby(spans, key=lambda s: _names(s)[: row + 1]):
            mine = list(group)
            yield Bar(row, names, mine[0].start, sum([s.seconds for s in mine]))


def _names(span: Span) -> tuple[str, ...]:
    operation = span.name.partition("::")[2] or span.name
    return span.phase, span.function or "fzero", os.path.basename(span.line) or "-", operation


def colours(spans: Sequence[Span]) -> tuple[dict[str, str], ...]:
    """Return the colours of passes, of the dearest functions, and of the dearest operations, by their names."""
    return PASSES, _of_dearest(spans, 1, FUNCTIONS), _of_dearest(spans, 3, OPERATIONS)


def _of_dearest(spans: Sequence[Span], row: int, chosen: Sequence[str]) -> dict[str, str]:
    sums: dict[str, float] = {}
    for span in spans:
        name = _names(span)[row]
        sums[name] = sums.get(name, 0.0) + span.seconds
    return dict(zip(sorted(sums, key=lambda name: -sums[name]), chosen, strict=False))


def label(text: str, share: float) -> str:
    """Return what of a text fits into a share of the width: "" where not even its beginning does."""
    room = int(LETTERS * share)
    return text if len(text) <= room else text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}" if room >= 4 else ""


def draw(name: str, spans: Sequence[Span]) -> Any:
    """Draw a flame chart as a figure of matplotlib. A line has the colour of its function."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    passes, functions, operations = colours(spans)
    of = (passes, functions, functions, operations)
    whole = sum([s.seconds for s in spans]) or 1.0
    for bar in bars(spans):
        if bar.seconds < LEAST * whole:
            continue
        box = [(bar.start * 1e3, bar.seconds * 1e3)]
        colour = of[bar.row].get(bar.names[1 if bar.row == 2 else bar.row], OTHERS)
        axes.broken_barh(box, (-bar.row - 0.9, 0.9), facecolor=colour, edgecolor="white", linewidth=0.4)
        middle, text = (bar.start + bar.seconds / 2) * 1e3, label(bar.text, bar.seconds / whole)
        axes.text(middle, -bar.row - 0.45, text, ha="center", va="center", fontsize=6.5, clip_on=True)
    axes.set(xlabel="ms of operations, one after the other", xlim=(0, whole * 1e3), ylim=(-len(ROWS), 0), title=name)
    axes.set_yticks([-row - 0.45 for row in range(len(ROWS))], ROWS)
    named = {**{f"in {text}": colour for text, colour in functions.items()}, **operations, "others": OTHERS}
    patches = [Patch(color=colour, label=text) for text, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    return figure
