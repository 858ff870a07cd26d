"""A table of configurations as a picture: peak against seconds."""

from typing import TYPE_CHECKING, Any

from fzero._format import format_bytes
from fzero._report import new_figure

if TYPE_CHECKING:
    from fzero.tuning._tune import ConfigurationTable

__all__ = ["draw"]


_MARKERS = ("o", "^", "s", "D")  # by stage


def draw(table: "ConfigurationTable") -> Any:
    """Draw a table as a matplotlib figure."""
    figure = new_figure(9, 5.5)
    axes: Any = figure.subplots()
    for stage in sorted({r.config.stage for r in table.rows}):
        for fits, color in ((True, "C0"), (False, "0.7")):
            rows = [r for r in table.rows if r.config.stage == stage and (r.peak_bytes <= table.budget_bytes) == fits]
            fitting = any(r.config.stage == stage for r in table.fitting)
            label = f"stage {stage}" if fits == fitting else None
            x, y = [r.seconds for r in rows], [r.peak_bytes / 1e9 for r in rows]
            axes.plot(x, y, _MARKERS[stage], color=color, markersize=6, label=label, alpha=0.8)
    frontier = table.frontier
    line = [r.seconds for r in frontier], [r.peak_bytes / 1e9 for r in frontier]
    axes.plot(*line, color="C1", linewidth=1, label="none is both faster and smaller", zorder=0)
    axes.axhline(table.budget_bytes / 1e9, color="C3", linestyle="--", linewidth=1)
    axes.text(
        1,
        table.budget_bytes / 1e9,
        f"{format_bytes(table.budget_bytes)} ",
        color="C3",
        va="bottom",
        ha="right",
        transform=_edge_transform(axes),
    )
    if table.fitting:
        best = table.fitting[0]
        point = (best.seconds, best.peak_bytes / 1e9)
        axes.plot(*point, "o", ms=14, mfc="none", mec="C2", mew=2, linestyle="none", label=f"best: {best.config}")
    axes.set(xlabel="seconds of a step, by the model", ylabel="peak of a rank, GB")
    axes.set(title=f"{len(table.fitting)} of {len(table.rows) + len(table.skipped)} fit {table.machine.name}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _edge_transform(axes: Any) -> Any:
    """Return the transform whose x is a share of the axes, and whose y is in data units."""
    return axes.get_yaxis_transform()
