"""A plan as text: a summary, and all details on request."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fzero.graph.planning._liveness import KINDS
from fzero.graph.planning._phases import PHASES

if TYPE_CHECKING:
    from fzero.graph.planning._plan import Plan

__all__ = ["details", "headline", "short", "size", "summary"]

LABELED = ("gathered", "activations", "gradients", "buffers")  # the kinds whose largest value the summary names


def headline(plan: "Plan") -> str:
    """Return the line that gives the peak memory."""
    parts = f"{size(plan.argument_bytes)} of arguments + {size(plan.added_bytes)}"
    host = plan.peak_of("host")
    return f"{plan.name}: peak {size(plan.peak_bytes)} = {parts}" + (f"; on the host {size(host)}" if host else "")


def summary(plan: "Plan") -> str:
    """Return about ten lines on the live values at the peak and on communication; repeated blocks share a line."""
    lines = [headline(plan)]
    if plan.operations:
        operation = plan.operations[plan.peak_at]
        phase = operation.phase if operation.phase == "update" else f"{operation.phase} pass"
        lines.append(f"alive at the peak, in the {phase} ({operation.target}, {short(operation.line) or 'no line'}):")
        for kind, by_label in _live_at_peak(plan):
            label, most = by_label.most_common(1)[0]
            largest = f", {size(most)} of it {label}" if kind in LABELED and label else ""
            lines.append(f"  {size(sum(by_label.values())):>10}  {kind}{largest}")
    if plan.workspace_bytes:
        lines.append(f"beside the peak: {size(plan.workspace_bytes)} workspace of matrix products")
    moved, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    if count:
        lines.append(f"{count} collectives move {size(moved)}:")
        lines += _group_lines(plan)
    if plan.messages:
        sent, bytes_ = sum([m.times for m in plan.messages]), sum([m.bytes * m.times for m in plan.messages])
        lines.append(f"{sent} messages along {plan.messages[0].axis} send {size(bytes_)}")
    if plan.transfers:
        down, up = (sum(t.bytes * t.times for t in plan.transfers if t.kind == k) for k in ("to_host", "to_device"))
        lines.append(f"{len(plan.transfers)} transfers: {size(down)} to the host, {size(up)} to the device")
    rejected = f"; {len(plan.rejected)} other schedules were rejected" if plan.rejected else ""
    lines.append(f"{_work_text(plan)}{rejected}; details() lists all")
    return "\n".join(lines)


def _work_text(plan: "Plan") -> str:
    work = f"{plan.flops / 1e9:,.2f} GFLOP" if plan.flops < 1e13 else f"{plan.flops / 1e12:,.0f} TFLOP"
    operations = f"{len(plan.operations):,} operations, {work}"
    return f"{operations}; {plan.seconds:.3g} s by the cost model"


def _live_at_peak(plan: "Plan") -> Iterable[tuple[str, Counter[str]]]:
    """Yield the kinds of values that are alive at the peak, each with the bytes of its labels."""
    alive = plan.alive(plan.peak_at)
    for kind in KINDS:
        by_label: Counter[str] = Counter()
        for r in alive:
            if r.kind == kind and r.space == "device":
                by_label[short(r.label)] += r.bytes
        if sum(by_label.values()):
            yield kind, by_label


def _group_lines(plan: "Plan") -> list[str]:
    """Return one line for the collectives of each kind and pass, whose units are folded."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for c in plan.collectives:
        phase = "" if c.unit.startswith("(metric)") else plan.operations[c.position].phase
        groups.setdefault((phase, c.kind), []).append(c)
    lines = []
    order = (*PHASES, "")
    for (phase, kind), group in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        times, bytes_ = sum(c.times for c in group), sum(c.bytes * c.times for c in group)
        units = _fold([unit for c in group for unit in c.unit.split(" + ")])
        lines.append(f"  {phase:<8}  {times:>4} x {kind:<14}  {size(bytes_):>10}  {units}")
    return lines


def _fold(units: list[str]) -> str:
    """Return the names of units as text; units that differ only in a number are one name, such as "blocks.*"."""
    by_pattern: dict[str, set[str]] = {}
    for unit in units:
        by_pattern.setdefault(re.sub(r"\d+", "*", unit), set()).add(unit)
    names = [pattern if len(members) > 1 else next(iter(members)) for pattern, members in by_pattern.items()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def details(plan: "Plan") -> str:
    """Return all details: live values at the peak by leaf and line, each collective in order, and the schedules."""
    moved, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    lines = [headline(plan), f"{_work_text(plan)}; {count} collectives move {size(moved)}"]
    lines.append("schedule: " + _settings_text(plan.settings))
    for settings, peak, time in plan.rejected:
        lines.append(f"  rejected: {size(peak)}, {time:.3g} s with {_settings_text(settings)}")
    return "\n".join([*lines, "", *_peak_lines(plan), "", *_collective_lines(plan)])


def _peak_lines(plan: "Plan") -> list[str]:
    if not plan.operations:
        return []
    operation = plan.operations[plan.peak_at]
    lines = [
        f"alive at the peak, in operation {plan.peak_at} ({operation.target}, {short(operation.line) or 'no line'}):"
    ]
    for kind, by_label in _live_at_peak(plan):
        lines.append(f"  {size(sum(by_label.values())):>10}  {kind}")
        lines += [f"  {'':>10}  {size(bytes_):>10}  {label}" for label, bytes_ in by_label.most_common(4) if bytes_]
        lines += [f"  {'':>10}  {'':>10}  and {len(by_label) - 4} more"] if len(by_label) > 4 else []
    return lines


def _collective_lines(plan: "Plan") -> list[str]:
    """Return one line per collective, in order, with the work and the peak since the collective before."""
    lines = [f"{'operation':>9}  {'collective':<14}  {'bytes':>10}  {'GFLOP before':>12}  {'peak before':>11}  unit"]
    before = 0
    for c in plan.collectives:
        work = sum(o.flops * o.times for o in plan.operations[before : c.position]) / 1e9
        peak = max(plan.live[before : c.position + 1], default=0)
        times = f" ({c.times} times)" if c.times > 1 else ""
        lines.append(
            f"{c.position:>9}  {c.kind:<14}  {size(c.bytes):>10}  {work:>12,.2f}  {size(peak):>11}  {c.unit}{times}"
        )
        before = c.position + 1
    work = sum(o.flops * o.times for o in plan.operations[before:]) / 1e9
    peak = max(plan.live[before:], default=0)
    return [*lines, f"{len(plan.operations):>9}  {'the end':<14}  {'':>10}  {work:>12,.2f}  {size(peak):>11}"]


def size(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def short(line: str) -> str:
    """Shorten the path of a source line to its last two parts."""
    return os.sep.join(line.split(os.sep)[-2:]) if os.sep in line else line


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join([f"{k} {v}" if isinstance(v, bool | str) else f"{k} {v:,}" for k, v in settings.items()])
