"""Render a table of configurations as text, with rich."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fzero._format import format_bytes, format_seconds
from fzero.tuning._search_space import EVERY_SECOND, PARALLEL

if TYPE_CHECKING:
    from fzero.tuning._row import TableRow
    from fzero.tuning._search_space import Configuration
    from fzero.tuning._tune import ConfigurationTable

__all__ = [
    "axes_shown",
    "format_axis",
    "format_limits",
    "format_remat",
    "headline",
    "list_warnings",
    "notes",
    "render",
    "render_comparison",
    "table_text",
    "table_width",
]


_MAX_FITS, _MAX_MISSES = 12, 6  # how many rows are shown that fit, and that nearly fit
_PARTS = {
    "params": ("parameters",),
    "state": ("optimizer state",),
    "grads": ("gradients",),
    "activations": ("activations",),
    "gathered": ("gathered",),
    "other": ("inputs", "buffers"),
}


def table_text(table: "ConfigurationTable") -> str:
    """Render a table of configurations, without colours."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=table_width(table, 200), color_system=None).print(render(table))
    return "\n".join([line.rstrip() for line in out.getvalue().splitlines()])


def table_width(table: "ConfigurationTable", min_width: int) -> int:
    """Return the number of characters in a line that shows all columns whole, at least `min_width`."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000)
    return max(Measurement.get(console, console.options, _rich_table(table)).maximum, min_width)


def render(table: "ConfigurationTable") -> Any:
    """Render the headline, the rows, the best configuration, and the constants behind the seconds."""
    from rich.console import Group
    from rich.text import Text

    best = str(table.best()) if table.fitting else "nothing fits; best() shows what would need less memory"
    rules = [f"rule {verdict}" for verdict in table.rules()]
    return Group(Text(headline(table)), _rich_table(table), Text("\n".join([best, *rules, *notes(table)])))


def headline(table: "ConfigurationTable") -> str:
    """Return a line on how many configurations fit the budget."""
    remark = f" ({format_bytes(table.memory)} less a margin)" if table.memory not in (None, table.budget_bytes) else ""
    total = len(table.rows) + len(table.skipped) + len(table.unplanned)
    budget = format_bytes(table.budget_bytes)
    return f"{len(table.fitting)} of {total} configurations fit {budget}{remark} of {table.machine.name}"


def notes(table: "ConfigurationTable") -> list[str]:
    """Return lines on skipped and extrapolated rows, unused links, what limits the best, and constants' sources."""
    lines = []
    if table.skipped:
        lines.append(f"not planned: {len(table.skipped)}, since each holds no less than another that does not fit")
    lines += _notes_on_unplanned(table)
    rough = sum([not r.in_full for r in table.rows])
    if rough:
        lines.append(
            f"{rough} rows (~) are extrapolated from two models of fewer blocks, and a third confirms the line"
        )
    traffic_axes = {axis for row in table.rows for axes in row.traffic_bytes for axis in axes.split(",")}
    unused = [axis for axis, _ in table.machine.axis_bandwidths if axis not in traffic_axes]
    if unused:
        lines += [f"links: no collective runs along {', '.join(unused)}"]
    if table.fitting and table.fitting[0].limits:
        lines.append(f"the best step is limited by {format_limits(table.fitting[0].limits)}")
        lines += [_HINT_OF_HOSTS] if _waits_for_hosts(table) else []
    constants = [f"{c.name} {c.value} ({c.source})" for c in table.machine.constants()]
    lines.append(f"seconds are estimates, by these constants: {'; '.join(constants)}")
    return lines


_HINT_OF_HOSTS = "host=(1, hosts), or --host auto, also plans units that pass the link between hosts once a step"


def _waits_for_hosts(table: "ConfigurationTable") -> bool:
    """Return whether the best step waits for collectives of several hosts, and no row sends them by hosts."""
    best, configs = table.fitting[0], [r.config for r in table.rows]
    c = best.config
    can_split = c.layout.shards_state and c.ep == c.cp == c.pp == 1 and c.world > table.machine.ranks
    return can_split and best.limits.get("wire", 0.0) > 0.2 and all(x.host == 1 for x in configs)


def _notes_on_unplanned(table: "ConfigurationTable") -> list[str]:
    """Return lines on the configurations that a search by bounds did not plan, and how fast they may be."""
    count, left_out_count = len(table.unplanned), table.left_out
    if not count:
        return []
    large = sum([x.bounds.bytes > table.budget_bytes for x in table.unplanned])
    lines = [
        f"not planned: {large} that surely do not fit, and {count - large - len(left_out_count)} that are surely slower"
    ]
    if not left_out_count:
        return lines
    fastest = min(left_out_count, key=lambda x: x.bounds.seconds)
    bound_text = f"at least {format_seconds(fastest.bounds.seconds)} a step: {fastest.config}"
    return [
        *lines,
        f"left out: {len(left_out_count)} that may be faster, since no more rows were asked for; {bound_text}",
    ]


def _rich_table(table: "ConfigurationTable") -> Any:
    """Return the rows as a table of rich: those that fit, the fastest first, then those that are too large."""
    from rich.table import Table as RichTable

    grid = RichTable(box=None, pad_edge=False, header_style="bold")
    axes, moved_axes = axes_shown(table), _moved_shown(table)
    traffic_headers = ["moved", *[f"over {axis}" for axis in moved_axes]]
    columns = [
        "stage",
        "batch",
        "remat",
        "precision",
        "offload",
        *axes,
        "peak",
        *_PARTS,
        *traffic_headers,
        "seconds",
        "",
    ]
    for name in columns:
        is_left_aligned = name in ("remat", "precision", "schedule", "")
        grid.add_column(name, justify="left" if is_left_aligned else "right", no_wrap=True)
    fitting_rows, too_large_rows = table.fitting, table.too_large
    for row in [*fitting_rows[:_MAX_FITS], *too_large_rows[:_MAX_MISSES]]:
        excess_bytes = row.peak_bytes - table.budget_bytes
        if excess_bytes > 0:
            verdict, style = f"{format_bytes(excess_bytes)} too much", "dim"
        else:
            verdict, style = "fits", "bold green" if row is fitting_rows[0] else ""
        texts = _row_cells(row)
        settings, numbers, seconds = texts[:5], texts[5:-1], texts[-1]
        along = [format_bytes(n) if (n := row.traffic_bytes.get(axis, 0)) else "-" for axis in moved_axes]
        sizes = [format_axis(row.config, name) for name in axes]
        grid.add_row(*settings, *sizes, *numbers, *along, seconds, verdict, style=style)
    hidden = max(len(fitting_rows) - _MAX_FITS, 0), max(len(too_large_rows) - _MAX_MISSES, 0)
    if any(hidden):
        grid.add_row("...", *[""] * (len(columns) - 2), f"{hidden[0]} more fit, {hidden[1]} do not")
    return grid


def axes_shown(table: "ConfigurationTable") -> list[str]:
    """List the axes that have a column: those that a row uses, and the schedule if there are several."""
    configs = [r.config for r in table.rows]
    axes = [name for name in PARALLEL if any(getattr(c, name) > 1 for c in configs)]
    return axes + (["schedule"] if len({c.schedule_setting for c in configs if c.pp > 1}) > 1 else [])


def _moved_shown(table: "ConfigurationTable") -> list[str]:
    """List the axes whose moved bytes have a column: those above a thousandth of a row, if there are several."""
    axes_by_name: dict[str, None] = {}
    for row in table.rows:
        min_bytes = sum(row.traffic_bytes.values()) / 1000
        axes_by_name |= dict.fromkeys([axes for axes, n in row.traffic_bytes.items() if n > min_bytes])
    order = {"dp": 0, "host": 1, "dp,ep": 1, "ep": 2, "dp,cp": 3, "cp": 4, "tp": 5, "pp": 6}
    return sorted(axes_by_name, key=lambda axes: (order.get(axes, 3), axes)) if len(axes_by_name) > 1 else []


def format_axis(config: "Configuration", name: str) -> str:
    """Format the size of an axis of a configuration, or its schedule."""
    if name != "schedule":
        return str(getattr(config, name))
    return config.schedule_setting if config.pp > 1 else "-"


def format_limits(limits: Mapping[str, float]) -> str:
    """Format the shares of a step by what bounds it, the largest first, without those below 5%: "products 71%"."""
    shares = sorted(limits.items(), key=lambda x: -x[1])
    return ", ".join([f"{limit} {share:.0%}" for limit, share in shares if share >= 0.05])


def format_remat(config: "Configuration") -> str:
    """Format the setting of remat."""
    return {False: "no", True: "yes", "matmuls": "but matmuls", EVERY_SECOND: "every second"}[config.remat]


def _row_cells(row: "TableRow") -> list[str]:
    """Format the numbers of a row, with suitable units."""
    c = row.config
    parts = [sum([row.device_bytes.get(kind, 0) for kind in kinds]) for kinds in _PARTS.values()]
    return [
        str(c.stage),
        f"{c.micro_batch} x {c.accumulation}",
        format_remat(c),
        c.precision,
        f"{c.offload:g}",
        ("" if row.in_full else "~") + format_bytes(row.peak_bytes),
        *[format_bytes(n) if n >= 0.0005 * row.peak_bytes else "-" for n in parts],
        format_bytes(sum(row.traffic_bytes.values())),
        format_seconds(row.seconds),
    ]


def render_comparison(table: "ConfigurationTable", other_table: "ConfigurationTable", names: tuple[str, str]) -> Any:
    """Render the configurations that two tables share, side by side. They are sorted by the seconds of the second.

    Args:
        table: a table.
        other_table: another table.
        names: the names of both tables.
    """
    from rich.table import Table as RichTable

    old_rows = {r.config: r for r in table.rows}
    grid = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in (
        "configuration",
        *[f"{column}, {n}" for column in ("peak", "seconds") for n in names],
        "peak",
        "seconds",
    ):
        grid.add_column(name, justify="left" if name == "configuration" else "right", no_wrap=True)
    for row in sorted(other_table.rows, key=lambda r: r.seconds):
        if (old := old_rows.get(row.config)) is not None:
            peaks, times = (old.peak_bytes, row.peak_bytes), (old.seconds, row.seconds)
            changes = [f"{b / a - 1:+.1%}" for a, b in (peaks, times)]
            grid.add_row(str(row.config), *map(format_bytes, peaks), *map(format_seconds, times), *changes)
    unique = [len(a.rows) - grid.row_count for a in (table, other_table)]
    if any(unique):
        grid.add_row(f"{unique[0]} only in {names[0]}, {unique[1]} only in {names[1]}", style="dim")
    return grid


def list_warnings(table: "ConfigurationTable") -> list[str]:
    """List the ways in which the numbers of a table are estimates."""
    is_gpu = table.machine.kind == "cuda"
    fusion = (
        "seconds count operations that Inductor may fuse as one kernel; it was not run"
        if any(r.config.compiled for r in table.rows)
        else "seconds are those of unfused torch operations: Inductor's fused kernels take less, --compile"
    )
    caveats = [
        "peaks were not measured on a GPU: they are those of torch's operations with fused attention; the margin "
        "covers a GPU's workspaces, context and fragmentation",
        fusion,
    ]
    if any(r.config.offload for r in table.rows):
        caveats.append(
            "copies of offload count at their place in the step; the host's update overlaps with the work after it"
        )
    if any(r.config.precision == "float16" for r in table.rows):
        caveats.append("float16 needs a loss scale, which the lines below lack: add fzero.optim.dynamic_loss_scale")
    return caveats if is_gpu else caveats[1:]
