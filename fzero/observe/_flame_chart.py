"""A flame chart of one step: its passes, the functions and modules in them as they nest, their lines and operations."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fzero._report import new_figure
from fzero.observe._lines import Span

__all__ = ["draw"]


_PASSES = {"forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b"}


_FUNCTIONS = ("#b279a2", "#72b7b2", "#eeca3b", "#e45756", "#9d755d")


_OPERATIONS = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9", "#ff9d98", "#bab0ac")


_OTHER_COLOUR = "#dddddd"


_MAX_ROWS = 8  # the largest number of rows of the chart for functions and modules


_MIN_SHARE = 0.0005  # bars below this share of the step are left out


_LETTERS_PER_LINE = 170  # the number of letters that fit into the full width


class _Bar(NamedTuple):
    """A bar of the chart.

    Attributes:
        row: the row, 0 for passes, then functions and modules, lines and operations.
        names: the names of the bars above it and its own.
        start: its start in seconds.
        seconds: its length in seconds.
        function: the innermost function or module that it lies in or is, without numbers of layers; "" for a pass.
    """

    row: int
    names: tuple[str, ...]
    start: float
    seconds: float
    function: str

    @property
    def text(self) -> str:
        """The bar's own name."""
        return self.names[-1]


def _bars(spans: Sequence[Span]) -> Iterator[_Bar]:
    """Yield the bars of a chart. Neighbours with the same name are joined if the bars above them are the same."""
    rows = len(_row_names(spans))
    named_spans = [(_names(s, rows), s) for s in spans]
    for row in range(rows):
        for names, group in groupby(named_spans, key=lambda x: x[0][: row + 1]):
            if names[-1]:
                group_spans = [span for _, span in group]
                inner = next((name for name in reversed(names[1 : rows - 2]) if name), "")
                seconds = sum([s.seconds for s in group_spans])
                yield _Bar(
                    row=row, names=names, start=group_spans[0].start, seconds=seconds, function=_without_numbers(inner)
                )


def _row_names(spans: Sequence[Span]) -> tuple[str, ...]:
    """Return the names of a chart's rows: as many for functions and modules as the deepest stack has, at most 8."""
    depth = min(max([len(_span_frames(s)) for s in spans], default=1), _MAX_ROWS)
    return ("pass", "function", *[""] * (depth - 1), "line", "operation")


def _span_frames(span: Span) -> tuple[str, ...]:
    return span.stack or (span.function or "fzero",)


def _names(span: Span, rows: int) -> tuple[str, ...]:
    """Return a span's name in each row; "" where its stack has no name."""
    stack = (*_span_frames(span), *[""] * rows)[: rows - 3]
    return span.phase, *stack, os.path.basename(span.line) or "-", _span_operation(span)


def _span_operation(span: Span) -> str:
    return span.name.partition("::")[2] or span.name


def _without_numbers(name: str) -> str:
    """Return a module's name without the numbers of layers, so that equal layers look alike."""
    return re.sub(r"\.?\b\d+\b", "", name)


def _colours(spans: Sequence[Span]) -> tuple[dict[str, str], ...]:
    """Return the colours of passes, of the most expensive functions, and of the most expensive operations, by name."""
    functions = [(_without_numbers(_span_frames(s)[:_MAX_ROWS][-1]), s.seconds) for s in spans]
    operations = [(_span_operation(s), s.seconds) for s in spans]
    return _PASSES, _top_colours(functions, _FUNCTIONS), _top_colours(operations, _OPERATIONS)


def _top_colours(costs: Iterable[tuple[str, float]], palette: Sequence[str]) -> dict[str, str]:
    """Give the names of the largest sums of seconds the colours of a palette."""
    sums: dict[str, float] = {}
    for name, seconds in costs:
        sums[name] = sums.get(name, 0.0) + seconds
    return dict(zip(sorted(sums, key=lambda name: -sums[name]), palette, strict=False))


def _cut_label(text: str, share: float) -> str:
    """Return a text cut to a share of the width; "" if not even its beginning fits."""
    room = int(_LETTERS_PER_LINE * share)
    if len(text) <= room:
        return text
    return text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}" if room >= 4 else ""


def draw(name: str, spans: Sequence[Span]) -> Any:
    """Draw a flame chart as a matplotlib figure. A line has the colour of its function."""
    from matplotlib.patches import Patch

    rows = _row_names(spans)
    figure = new_figure(11, 2.4 + 0.35 * len(rows))
    axes = figure.subplots()
    passes, functions, operations = _colours(spans)
    total = sum([s.seconds for s in spans]) or 1.0
    for bar in _bars(spans):
        if bar.seconds < _MIN_SHARE * total:
            continue
        if 0 < bar.row < len(rows) - 1:
            colour = functions.get(bar.function, _OTHER_COLOUR)
        else:
            colour = (operations if bar.row else passes).get(bar.text, _OTHER_COLOUR)
        extent = [(bar.start * 1e3, bar.seconds * 1e3)]
        axes.broken_barh(extent, (-bar.row - 0.9, 0.9), facecolor=colour, edgecolor="white", linewidth=0.4)
        middle, text = (bar.start + bar.seconds / 2) * 1e3, _cut_label(bar.text, bar.seconds / total)
        axes.text(middle, -bar.row - 0.45, text, ha="center", va="center", fontsize=6.5, clip_on=True)
    axes.set(xlabel="ms of operations, one after the other", xlim=(0, total * 1e3), ylim=(-len(rows), 0), title=name)
    axes.set_yticks([-row - 0.45 for row in range(len(rows))], rows)
    legend = {**{f"in {text}": colour for text, colour in functions.items()}, **operations, "others": _OTHER_COLOUR}
    patches = [Patch(color=colour, label=text) for text, colour in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    return figure
