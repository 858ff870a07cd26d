"""Tables of configurations as one self-contained page for any browser."""

import html
import importlib.resources
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fzero.graph import KINDS, LIMITS, Interval, Plan, ScheduleOptions, phase_spans
from fzero.tuning._configured_step import step_at, step_on
from fzero.tuning._recipe import recipe
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import PARALLEL
from fzero.tuning._table_views import axes_shown, format_axis, format_remat, headline, list_warnings, notes
from fzero.tuning._tune import ConfigurationTable

__all__ = ["Case", "html_page"]

_MAX_POINTS = 600  # points of a timeline


class Case(NamedTuple):
    """A table of a page: what was planned, and its table.

    Attributes:
        choices: the values that the reader of the page chooses by: the model, and sizes such as "ranks" and "length".
        table: the table of configurations.
        make_step: the function that the table was made with, for the timelines; None leaves them out.
    """

    choices: Mapping[str, Any]
    table: ConfigurationTable
    make_step: Callable[..., Any] | None = None


def html_page(cases: Sequence[Case]) -> str:
    """Return a page with the best configuration of a case, its table, its picture, and the best step over time.

    Of several cases the reader chooses one, by the values in which they differ.
    """
    frame = importlib.resources.files("fzero.tuning").joinpath("page.html").read_text(encoding="utf-8")
    fields = {"kinds": KINDS, "limits": LIMITS, "cases": [_case_fields(case) for case in cases]}
    data = json.dumps(fields).replace("</", "<\\/")  # a bare </ would end the script
    models = ", ".join(dict.fromkeys([str(case.choices["model"]) for case in cases]))
    return frame.replace("{{title}}", html.escape(f"fzero plan {models}")).replace("{{data}}", data)


def _case_fields(case: Case) -> dict[str, Any]:
    """Return what the page shows of a case, as JSON."""
    table = case.table
    best = table.best() if table.fitting else None
    over_time = _plan_over_time(table, case.make_step) if best and case.make_step else (None, None)
    return {
        "choices": dict(case.choices),
        "headline": headline(table),
        "best": str(best) if best else "nothing fits",
        "recipe": recipe(best.config) if best else "",
        "notes": [*[f"rule {verdict}" for verdict in table.rules()], *notes(table), *list_warnings(table)],
        "budget": table.budget_bytes,
        "axes": axes_shown(table),
        "rows": [_page_row(r, table.budget_bytes) for r in [*table.fitting, *table.too_large]],
        "timeline": over_time[0],
        "streams": over_time[1],
    }


def _page_row(row: TableRow, budget_bytes: float) -> dict[str, Any]:
    """Return what the page shows of a row, as JSON."""
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
        "over": max(row.peak_bytes - budget_bytes, 0),
        "rough": not row.in_full,
        "device": row.device_bytes,
        "limits": row.limits,
    }


def _plan_over_time(
    table: ConfigurationTable, make_step: Callable[..., Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Plan the best row again, and return its live bytes and its busy streams over the step.

    The streams are None if `make_step` returns plans.
    """
    row = table.fitting[0]
    step_args = step_at(make_step, row.config)
    if isinstance(step_args, Plan):
        return _live_bytes(step_args), None
    hardware = table.machine.as_hardware()
    rank = step_on(step_args, row.config.world, hardware, {"pp": row.rank} if row.config.pp > 1 else 0)
    if row.settings is not None:
        rank = rank._replace(step=rank.step.with_options(schedule_options=ScheduleOptions.of(row.settings)))
    return _live_bytes(rank.plan()), _stream_shares(rank.timeline())


def _live_bytes(plan: Plan) -> dict[str, Any]:
    """Sample a plan's live bytes by kind. Each point shows the maximum since the point before."""
    by_kind = {kind: plan.live_of(kind) for kind in KINDS}
    phases = [name for start, stop, name in phase_spans(plan) for _ in range(start, stop)]
    count = len(plan.operations)
    edges = sorted({round(i * count / _MAX_POINTS) for i in range(_MAX_POINTS + 1)})
    points = [max(range(a, b), key=plan.live.__getitem__) for a, b in itertools.pairwise(edges)]
    return {
        "phases": [phases[i] for i in points],
        "kinds": {kind: [live[i] for i in points] for kind, live in by_kind.items() if any(live)},
    }


def _stream_shares(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Divide a step into equal times, and return the share of each that a stream is busy, by what bounds it."""
    seconds = sum([x.seconds for x in intervals if x.stream == "compute"])
    width = seconds / _MAX_POINTS
    busy: dict[str, dict[str, list[float]]] = {}
    for x in intervals:
        shares = busy.setdefault(x.stream, {}).setdefault(x.limit, [0.0] * _MAX_POINTS)
        stop = x.start + x.seconds
        for i in range(min(int(x.start / width), _MAX_POINTS - 1), min(int(stop / width) + 1, _MAX_POINTS)):
            shares[i] += max(min(stop, (i + 1) * width) - max(x.start, i * width), 0.0) / width
    rounded = {
        stream: {limit: [round(share, 4) for share in shares] for limit, shares in limits.items()}
        for stream, limits in busy.items()
    }
    return {"seconds": seconds, "busy": rounded}
