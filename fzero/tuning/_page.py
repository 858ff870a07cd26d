"""A table of configurations as one page that any browser opens, by itself."""

import html
import importlib.resources
import itertools
import json
from collections.abc import Callable
from typing import Any

from fzero.graph.plan._liveness import KINDS
from fzero.graph.plan._picture import spans
from fzero.graph.plan._plan import Plan
from fzero.tuning._planned import made_at, planned
from fzero.tuning._recipe import recipe, warnings_of
from fzero.tuning._table import Table
from fzero.tuning._table_text import axes_shown, axis_of, headline, notes

__all__ = ["page"]

POINTS = 600  # of the timeline


def page(table: Table, name: str, make_step: Callable[..., Any] | None = None) -> str:
    """Write a page with the answer, the table, a picture of it, and the memory of the best over its step.

    Args:
        table: of configurations.
        name: of the model.
        make_step: that the table was made by, for the timeline; None leaves it out.
    """
    best = table.best() if table.fitting else None
    said = {
        "name": name,
        "headline": headline(table),
        "best": str(best) if best else "nothing fits",
        "recipe": recipe(best.config) if best else "",
        "notes": [*[f"rule {verdict}" for verdict in table.rules()], *notes(table), *warnings_of(table)],
        "budget": table.budget,
        "kinds": KINDS,
        "axes": axes_shown(table),
        "rows": [_row(r, table.budget) for r in [*table.fitting, *table.too_large]],
        "timeline": _timeline(table, make_step) if best and make_step else None,
    }
    frame = importlib.resources.files("fzero.tuning").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(said).replace("</", "<\\/")  # which would end the script
    return frame.replace("{{title}}", html.escape(f"fzero plan {name}")).replace("{{data}}", data)


def _row(row: Any, budget: float) -> dict[str, Any]:
    c = row.config
    remat = {False: "no", True: "yes"}.get(c.remat, f"but {c.remat}")
    return {
        "stage": c.stage,
        "micro": c.micro_batch,
        "accumulation": c.accumulation,
        "remat": remat,
        "precision": c.precision,
        "offload": c.offload,
        **{name: getattr(c, name) for name in ("ep", "tp", "pp")},
        "schedule": axis_of(c, "schedule"),
        "peak": row.peak_bytes,
        "seconds": row.seconds,
        "moved": sum(row.moved.values()),
        "along": row.moved,
        "host": row.host_bytes,
        "over": max(row.peak_bytes - budget, 0),
        "rough": not row.in_full,
        "held": row.held,
    }


def _timeline(table: Table, make_step: Callable[..., Any]) -> dict[str, Any]:
    """Plan the best again, and say what is alive at some points of its step: at each the most since the one before."""
    row = table.fitting[0]
    made = made_at(make_step, row.config)
    at = {"pp": row.rank} if row.config.pp > 1 else 0
    device = table.machine.as_device()
    plan = made if isinstance(made, Plan) else planned(made, row.config.world, device, row.settings, at)
    by_kind = {kind: plan.live_of(kind) for kind in KINDS}
    phases = [name for start, stop, name in spans(plan) for _ in range(start, stop)]
    count = len(plan.operations)
    edges = sorted({round(i * count / POINTS) for i in range(POINTS + 1)})
    at = [max(range(a, b), key=plan.live.__getitem__) for a, b in itertools.pairwise(edges)]
    return {
        "phases": [phases[i] for i in at],
        "kinds": {kind: [live[i] for i in at] for kind, live in by_kind.items() if any(live)},
    }
