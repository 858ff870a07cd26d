"""Draw a plan: live bytes over the step, its passes and its collectives."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fzero._report import new_figure
from fzero.graph.planning._liveness import KINDS
from fzero.graph.planning._text import size

if TYPE_CHECKING:
    from fzero.graph.planning._plan import Plan

__all__ = ["draw"]

LETTERS = 120  # that fit side by side over the width of the figure
MARKERS = {"all_gather": "v", "reduce_scatter": "^", "all_reduce": "d", "to_host": "v", "to_device": "^"}


def draw(plan: "Plan") -> Any:
    """Draw a plan as a matplotlib figure; host memory is drawn below, with the copies to the host and back."""
    offloads = bool(plan.peak_of("host"))
    figure = new_figure(11, 8 if offloads else 5)
    rows = figure.subplots(1 + offloads, 1, squeeze=False, sharex=True)[:, 0]
    _draw_memory(plan, rows[0], "device", [(c.kind, c.position) for c in plan.collectives])
    if offloads:
        _draw_memory(plan, rows[1], "host", [(t.kind, t.position) for t in plan.transfers])
    top = plan.peak_bytes / 1e6
    for start, stop, name in spans(plan):
        for axes in rows:
            if start:
                axes.axvline(start, color="black", linewidth=0.6)
        letters = round(LETTERS * (stop - start) / len(plan.operations))
        if letters >= max(map(len, name.split())):
            rows[0].text(
                (start + stop) / 2, 1.13 * top, textwrap.fill(name, letters), ha="center", va="center", fontsize=9
            )
    rows[-1].set(xlabel="operation", xlim=(0, max(len(plan.operations) - 1, 1)))
    on_host = f", {size(plan.peak_of('host'))} on the host" if offloads else ""
    rows[0].set(title=f"{plan.name}: peak {size(plan.peak_bytes)}{on_host}")
    return figure


def _draw_memory(plan: "Plan", axes: Any, space: str, marks: Iterable[tuple[str, int]]) -> None:
    """Draw the live bytes of a memory by kind, and the collectives or copies above them."""
    kinds = [k for k in KINDS if any(r.kind == k and r.space == space for r in plan.ranges)]
    colors = [f"C{KINDS.index(k)}" for k in kinds]  # a kind has the same color in both memories
    live = [[x / 1e6 for x in plan.live_of(k, space)] for k in kinds]
    axes.stackplot(range(len(plan.operations)), live, labels=kinds, colors=colors, step="post")
    top, moves = plan.peak_of(space) / 1e6, list(marks)
    for kind, marker in MARKERS.items():
        xs = [position for name, position in moves if name == kind]
        if xs:
            axes.plot(
                xs,
                [1.05 * top] * len(xs),
                marker,
                color="black",
                markersize=4,
                label=kind,
                linestyle="none",
            )
    axes.axhline(top, color="black", linewidth=0.8, linestyle="--")
    axes.set(ylabel="live, MB" if space == "device" else "on the host, MB", ylim=(0, 1.2 * top or 1))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def spans(plan: "Plan") -> Iterator[tuple[int, int, str]]:
    """Yield the start, stop and name of each pass; updates between gradients belong to the backward pass."""
    names = [o.phase if o.times == 1 else f"{o.phase}, {o.times} times" for o in plan.operations]
    last = {name: i for i, name in enumerate(names)}
    current, with_updates = "", set[str]()
    for i, name in enumerate(names):
        is_interleaved = name.startswith("update") and current.startswith("backward") and i < last[current]
        with_updates |= {current} if is_interleaved else set()
        current = current if is_interleaved else name
        names[i] = current
    start = 0
    for name, group in groupby(names):
        count = len(list(group))
        yield start, start + count, f"{name}, and updates" if name in with_updates else name
        start += count
