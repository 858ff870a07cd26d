"""A plan as a picture: live bytes over the step, its passes and its collectives."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fzero.graph.plan._liveness import KINDS
from fzero.graph.plan._text import size

if TYPE_CHECKING:
    from fzero.graph.plan._plan import Plan

__all__ = ["draw"]

MARKERS = {"all_gather": "v", "reduce_scatter": "^", "all_reduce": "d"}


def draw(plan: "Plan") -> Any:
    """Draw a plan as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = [k for k in KINDS if any(r.kind == k for r in plan.ranges)]
    rows = [[x / 1e6 for x in plan.live_of(k)] for k in kinds]
    axes.stackplot(range(len(plan.operations)), rows, labels=kinds, step="post")
    top = plan.peak_bytes / 1e6
    for kind, marker in MARKERS.items():
        at = [c.position for c in plan.collectives if c.kind == kind]
        if at:
            axes.plot(at, [1.05 * top] * len(at), marker, color="black", markersize=4, label=kind, linestyle="none")
    axes.axhline(top, color="black", linewidth=0.8, linestyle="--")
    for start, stop, name in spans(plan):
        if start:
            axes.axvline(start, color="black", linewidth=0.6)
        if stop - start > 0.04 * len(plan.operations):
            axes.text((start + stop) / 2, 1.13 * top, name, ha="center", va="center")
    axes.set(
        xlabel="operation", xlim=(0, max(len(plan.operations) - 1, 1)),
        ylabel="live, MB", ylim=(0, 1.18 * top or 1),
        title=f"{plan.name}: peak {size(plan.peak_bytes)}",
    )  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def spans(plan: "Plan") -> Iterator[tuple[int, int, str]]:
    """Yield where a pass begins and ends; updates between gradients belong to the backward pass."""
    names = [o.phase if o.times == 1 else f"{o.phase}, {o.times} times" for o in plan.operations]
    last = {name: i for i, name in enumerate(names)}
    shown, with_updates = "", set[str]()
    for i, name in enumerate(names):
        early = name.startswith("update") and shown.startswith("backward") and i < last[shown]
        with_updates |= {shown} if early else set()
        shown = shown if early else name
        names[i] = shown
    at = 0
    for name, group in groupby(names):
        count = len(list(group))
        yield at, at + count, f"{name}, and updates" if name in with_updates else name
        at += count
