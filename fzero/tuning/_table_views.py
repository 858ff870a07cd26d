"""A table of configurations as text and as a picture."""

import io
from typing import TYPE_CHECKING, Any

from fzero.graph import size

if TYPE_CHECKING:
    from fzero.tuning._row import Row
    from fzero.tuning._space import Configuration
    from fzero.tuning._table import Table

__all__ = [
    "axes_shown",
    "axis_of",
    "cells",
    "compared",
    "draw",
    "duration",
    "headline",
    "moved_shown",
    "notes",
    "rendered",
    "text",
]

# A table of configurations as text, by rich.


SHOWN, MISSES = 12, 6  # rows that fit, and those that nearly do
PARTS = {
    "params": ("parameters",),
    "state": ("optimizer state",),
    "grads": ("gradients",),
    "activations": ("activations",),
    "gathered": ("gathered",),
    "other": ("inputs", "buffers"),
}


def text(table: "Table") -> str:
    """Render a table of configurations, without colours."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(rendered(table))
    return "\n".join([line.rstrip() for line in out.getvalue().splitlines()])


def rendered(table: "Table") -> Any:
    """Render the answer, the rows, and the constants behind them."""
    from rich.console import Group
    from rich.text import Text

    best = str(table.best()) if table.fitting else "nothing fits; best() says what would need less"
    rules = [f"rule {verdict}" for verdict in table.rules()]
    return Group(Text(headline(table)), _rows(table), Text("\n".join([best, *rules, *notes(table)])))


def headline(table: "Table") -> str:
    """Say how many configurations fit, and what."""
    given = f" ({size(table.memory)} less a margin)" if table.memory not in (None, table.budget) else ""
    tried = len(table.rows) + len(table.skipped)
    return f"{len(table.fitting)} of {tried} configurations fit {size(table.budget)}{given} of {table.machine.name}"


def notes(table: "Table") -> list[str]:
    """Say what is left out, and where the numbers are from."""
    found = []
    if table.skipped:
        found.append(f"{len(table.skipped)} were not planned: each holds no less than one that does not fit")
    rough = sum([not r.in_full for r in table.rows])
    found += [f"{rough} rows (~) are told from two models of fewer blocks"] if rough else []
    moved = {axis for row in table.rows for axes in row.moved for axis in axes.split(",")}
    unused = [axis for axis, _ in table.machine.links if axis not in moved]
    found += [f"links: no collective runs along {', '.join(unused)}"] if unused else []
    constants = [f"{c.name} {c.value} ({c.source})" for c in table.machine.constants()]
    found.append(f"seconds are estimates, by these constants: {'; '.join(constants)}")
    return found


def _rows(table: "Table") -> Any:
    from rich.table import Table as Drawn

    drawn = Drawn(box=None, pad_edge=False, header_style="bold")
    axes, ways = axes_shown(table), moved_shown(table)
    moved = ["moved", *[f"over {way}" for way in ways]]
    columns = ["stage", "batch", "remat", "precision", "offload", *axes, "peak", *PARTS, *moved, "seconds", ""]
    for name in columns:
        left = name in ("remat", "precision", "schedule", "")
        drawn.add_column(name, justify="left" if left else "right", no_wrap=True)
    fits, misses = table.fitting, table.too_large
    for row in [*fits[:SHOWN], *misses[:MISSES]]:
        over = row.peak_bytes - table.budget
        said = f"{size(over)} too much" if over > 0 else "fits"
        style = "dim" if over > 0 else "bold green" if row is fits[0] else ""
        shown = cells(row)
        settings, numbers, seconds = shown[:5], shown[5:-1], shown[-1]
        along = [size(n) if (n := row.moved.get(way, 0)) else "-" for way in ways]
        places = [axis_of(row.config, name) for name in axes]
        drawn.add_row(*settings, *places, *numbers, *along, seconds, said, style=style)
    hidden = max(len(fits) - SHOWN, 0), max(len(misses) - MISSES, 0)
    if any(hidden):
        drawn.add_row("...", *[""] * (len(columns) - 2), f"{hidden[0]} more fit, {hidden[1]} do not")
    return drawn


def axes_shown(table: "Table") -> list[str]:
    """List the settings of further axes that have a column: those that are used, and a schedule where there are two."""
    configs = [r.config for r in table.rows]
    axes = [name for name in ("ep", "tp", "pp") if any(getattr(c, name) > 1 for c in configs)]
    return axes + (["schedule"] if len({c.schedule for c in configs if c.pp > 1}) > 1 else [])


def moved_shown(table: "Table") -> list[str]:
    """List the axes whose bytes have a column: those of more than a thousandth in a row, if they are several."""
    found: dict[str, None] = {}
    for row in table.rows:
        least = sum(row.moved.values()) / 1000
        found |= dict.fromkeys([axes for axes, n in row.moved.items() if n > least])
    order = {"dp": 0, "dp,ep": 1, "ep": 2, "tp": 4, "pp": 5}
    return sorted(found, key=lambda axes: (order.get(axes, 3), axes)) if len(found) > 1 else []


def axis_of(config: "Configuration", name: str) -> str:
    """Write a configuration's size of a further axis, or its schedule."""
    return "-" if name == "schedule" and config.pp == 1 else str(getattr(config, name))


def cells(row: "Row") -> list[str]:
    """Write a row's numbers in the units that suit them."""
    c = row.config
    parts = [sum([row.held.get(kind, 0) for kind in kinds]) for kinds in PARTS.values()]
    return [
        str(c.stage),
        f"{c.micro_batch} x {c.accumulation}",
        {False: "no", True: "yes"}.get(c.remat, f"but {c.remat}"),  # pyright: ignore[reportCallIssue, reportArgumentType]
        c.precision,
        f"{c.offload:g}",
        ("" if row.in_full else "~") + size(row.peak_bytes),
        *[size(n) if n >= 0.0005 * row.peak_bytes else "-" for n in parts],
        size(sum(row.moved.values())),
        duration(row.seconds),
    ]


def duration(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    if seconds >= 0.1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"


def compared(one: "Table", other: "Table", names: tuple[str, str]) -> Any:
    """Render the configurations that two tables have, side by side, the fastest of the second first.

    Args:
        one: a table.
        other: another.
        names: of both.
    """
    from rich.table import Table as Drawn

    before = {r.config: r for r in one.rows}
    drawn = Drawn(box=None, pad_edge=False, header_style="bold")
    for name in ("configuration", *[f"{what}, {n}" for what in ("peak", "seconds") for n in names], "peak", "seconds"):
        drawn.add_column(name, justify="left" if name == "configuration" else "right", no_wrap=True)
    for row in sorted(other.rows, key=lambda r: r.seconds):
        if (old := before.get(row.config)) is not None:
            peaks, times = (old.peak_bytes, row.peak_bytes), (old.seconds, row.seconds)
            changes = [f"{b / a - 1:+.1%}" for a, b in (peaks, times)]
            drawn.add_row(str(row.config), *map(size, peaks), *map(duration, times), *changes)
    alone = [len(a.rows) - drawn.row_count for a in (one, other)]
    if any(alone):
        drawn.add_row(f"{alone[0]} only in {names[0]}, {alone[1]} only in {names[1]}", style="dim")
    return drawn


# A table of configurations as a picture: peak against seconds.


MARKERS = ("o", "^", "s", "D")  # by stage


def draw(table: "Table") -> Any:
    """Draw a table as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for stage in sorted({r.config.stage for r in table.rows}):
        for fits, color in ((True, "C0"), (False, "0.7")):
            rows = [r for r in table.rows if r.config.stage == stage and (r.peak_bytes <= table.budget) == fits]
            fitting = any(r.config.stage == stage for r in table.fitting)
            label = f"stage {stage}" if fits == fitting else None
            x, y = [r.seconds for r in rows], [r.peak_bytes / 1e9 for r in rows]
            axes.plot(x, y, MARKERS[stage], color=color, markersize=6, label=label, alpha=0.8)
    frontier = table.frontier
    line = [r.seconds for r in frontier], [r.peak_bytes / 1e9 for r in frontier]
    axes.plot(*line, color="C1", linewidth=1, label="none is both faster and smaller", zorder=0)
    axes.axhline(table.budget / 1e9, color="C3", linestyle="--", linewidth=1)
    axes.text(
        1, table.budget / 1e9, f"{size(table.budget)} ", color="C3", va="bottom", ha="right", transform=_edge(axes)
    )
    if table.fitting:
        best = table.fitting[0]
        at = (best.seconds, best.peak_bytes / 1e9)
        axes.plot(*at, "o", ms=14, mfc="none", mec="C2", mew=2, linestyle="none", label=f"best: {best.config}")
    axes.set(xlabel="seconds of a step, by the model", ylabel="peak of a rank, GB")
    axes.set(title=f"{len(table.fitting)} of {len(table.rows) + len(table.skipped)} fit {table.machine.name}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _edge(axes: Any) -> Any:
    """Return the coordinates whose x is a share of the axes, and whose y is the data's."""
    return axes.get_yaxis_transform()
