"""A table of configurations as one self-contained page for any browser."""

import html
import importlib.resources
import itertools
import json
from collections.abc import Callable
from typing import Any

from fzero.graph import KINDS, Plan, phase_spans
from fzero.tuning._recipe import recipe
from fzero.tuning._row import TableRow, plan_step, step_at
from fzero.tuning._search_space import PARALLEL
from fzero.tuning._table_views import axes_shown, format_axis, format_remat, headline, notes, warnings_of
from fzero.tuning._tune import Table

__all__ = ["page"]

POINTS = 600  # points of the timeline


def page(table: Table, name: str, make_step: Callable[..., Any] | None = None) -> str:
    """Return a page with the best configuration, the table, its picture, and the memory of the best over its step.

    Args:
        table: the table of configurations.
        name: the name of the model.
        make_step: the function that the table was made with, for the timeline; None leaves the timeline out.
    """
    best = table.best() if table.fitting else None
    fields = {
        "name": name,
        "headline": headline(table),
        "best": str(best) if best else "nothing fits",
        "recipe": recipe(best.config) if best else "",
        "notes": [*[f"rule {verdict}" for verdict in table.rules()], *notes(table), *warnings_of(table)],
        "budget": table.budget,
        "kinds": KINDS,
        "axes": axes_shown(table),
        "rows": [_page_row(r, table.budget) for r in [*table.fitting, *table.too_large]],
        "timeline": _timeline(table, make_step) if best and make_step else None,
    }
    frame = importlib.resources.files("fzero.tuning").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(fields).replace("</", "<\\/")  # a bare </ would end the script
    return frame.replace("{{title}}", html.escape(f"fzero plan {name}")).replace("{{data}}", data)


def _page_row(row: TableRow, budget: float) -> dict[str, Any]:
    c = row.config
    return {
        "stage": c.stage,
        "micro": c.micro_batch,
        "accumulation": c.accumulation,
        "remat": format_remat(c),
        "precision": c.precision,
        "offload": c.offload,
        **{name: getattr(c, name) for name in PARALLEL},
        "schedule": format_axis(c, "schedule"),
        "peak": row.peak_bytes,
        "seconds": row.seconds,
        "traffic": sum(row.traffic_bytes.values()),
        "along": row.traffic_bytes,
        "host": row.host_bytes,
        "over": max(row.peak_bytes - budget, 0),
        "rough": not row.in_full,
        "device": row.device_bytes,
    }


def _timeline(table: Table, make_step: Callable[..., Any]) -> dict[str, Any]:
    """Plan the best row again, and sample its live bytes. Each point shows the maximum since the point before."""
    row = table.fitting[0]
    step_args = step_at(make_step, row.config)
    rank = {"pp": row.rank} if row.config.pp > 1 else 0
    hardware = table.machine.as_hardware()
    plan = (
        step_args
        if isinstance(step_args, Plan)
        else plan_step(step_args, row.config.world, hardware, row.settings, rank)
    )
    by_kind = {kind: plan.live_of(kind) for kind in KINDS}
    phases = [name for start, stop, name in phase_spans(plan) for _ in range(start, stop)]
    count = len(plan.operations)
    edges = sorted({round(i * count / POINTS) for i in range(POINTS + 1)})
    points = [max(range(a, b), key=plan.live.__getitem__) for a, b in itertools.pairwise(edges)]
    return {
        "phases": [phases[i] for i in points],
        "kinds": {kind: [live[i] for i in points] for kind, live in by_kind.items() if any(live)},
    }
