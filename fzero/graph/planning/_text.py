"""A plan as text: the answer first, and all of it on request."""

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

NAMED = ("gathered", "activations", "gradients", "buffers")  # the kinds of which the largest is named


def headline(plan: "Plan") -> str:
    """Say what the peak is."""
    parts = f"{size(plan.argument_bytes)} of arguments + {size(plan.added_bytes)}"
    host = plan.peak_of("host")
    return f"{plan.name}: peak {size(plan.peak_bytes)} = {parts}" + (f"; on the host {size(host)}" if host else "")


def summary(plan: "Plan") -> str:
    """Say in some ten lines what the peak is made of, and what is sent; blocks that repeat are one line."""
    lines = [headline(plan)]
    if plan.operations:
        at = plan.operations[plan.peak_at]
        during = at.phase if at.phase == "update" else f"{at.phase} pass"
        lines.append(f"alive at the peak, in the {during} ({at.target}, {short(at.line) or 'no line'}):")
        for kind, same in _alive(plan):
            label, most = same.most_common(1)[0]
            of = f", {size(most)} of it {label}" if kind in NAMED and label else ""
            lines.append(f"  {size(sum(same.values())):>10}  {kind}{of}")
    moved, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    if count:
        lines.append(f"{count} collectives move {size(moved)}:")
        lines += _groups(plan)
    if plan.messages:
        sent, bytes_ = sum([m.times for m in plan.messages]), sum([m.bytes * m.times for m in plan.messages])
        lines.append(f"{sent} messages along {plan.messages[0].axis} send {size(bytes_)}")
    if plan.transfers:
        down, up = (sum(t.bytes * t.times for t in plan.transfers if t.kind == k) for k in ("to_host", "to_device"))
        lines.append(f"{len(plan.transfers)} transfers: {size(down)} to the host, {size(up)} to the device")
    others = f"; {len(plan.rejected)} other schedules were not kept" if plan.rejected else ""
    lines.append(f"{_work(plan)}{others}; details() says all")
    return "\n".join(lines)


def _work(plan: "Plan") -> str:
    work = f"{plan.flops / 1e9:,.2f} GFLOP" if plan.flops < 1e13 else f"{plan.flops / 1e12:,.0f} TFLOP"
    operations = f"{len(plan.operations):,} operations, {work}"
    return f"{operations}; {plan.seconds:.3g} s by the cost model"


def _alive(plan: "Plan") -> Iterable[tuple[str, Counter[str]]]:
    """Yield the kinds that are alive at the peak, each with the bytes of its labels."""
    alive = plan.alive(plan.peak_at)
    for kind in KINDS:
        same: Counter[str] = Counter()
        for r in alive:
            if r.kind == kind and r.space == "device":
                same[short(r.label)] += r.bytes
        if sum(same.values()):
            yield kind, same


def _groups(plan: "Plan") -> list[str]:
    """List collectives of one kind and pass, of units that are alike but for a number, as one line."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for c in plan.collectives:
        phase = "" if c.unit.startswith("(metric)") else plan.operations[c.position].phase
        groups.setdefault((phase, c.kind), []).append(c)
    lines = []
    order = (*PHASES, "")
    for (phase, kind), found in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        times, bytes_ = sum(c.times for c in found), sum(c.bytes * c.times for c in found)
        units = _folded([unit for c in found for unit in c.unit.split(" + ")])
        lines.append(f"  {phase:<8}  {times:>4} x {kind:<14}  {size(bytes_):>10}  {units}")
    return lines


def _folded(units: list[str]) -> str:
    """Name units, of which those that differ in a number alone are one: "blocks.*"."""
    alike: dict[str, set[str]] = {}
    for unit in units:
        alike.setdefault(re.sub(r"\d+", "*", unit), set()).add(unit)
    names = [pattern if len(found) > 1 else next(iter(found)) for pattern, found in alike.items()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def details(plan: "Plan") -> str:
    """Say all: what is alive at the peak by leaf and line, each collective in order, and the schedules."""
    moved, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    lines = [headline(plan), f"{_work(plan)}; {count} collectives move {size(moved)}"]
    lines.append("schedule: " + _shown(plan.settings))
    for settings, peak, time in plan.rejected:
        lines.append(f"  not kept: {size(peak)}, {time:.3g} s with {_shown(settings)}")
    return "\n".join([*lines, "", *_at_the_peak(plan), "", *_order(plan)])


def _at_the_peak(plan: "Plan") -> list[str]:
    if not plan.operations:
        return []
    at = plan.operations[plan.peak_at]
    lines = [f"alive at the peak, in operation {plan.peak_at} ({at.target}, {short(at.line) or 'no line'}):"]
    for kind, same in _alive(plan):
        lines.append(f"  {size(sum(same.values())):>10}  {kind}")
        lines += [f"  {'':>10}  {size(bytes_):>10}  {label}" for label, bytes_ in same.most_common(4) if bytes_]
        lines += [f"  {'':>10}  {'':>10}  and {len(same) - 4} more"] if len(same) > 4 else []
    return lines


def _order(plan: "Plan") -> list[str]:
    """List the collectives in order, each with the work and the peak since the one before."""
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
    """Write a number of bytes in the unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def short(line: str) -> str:
    """Leave of a source line's path the last two parts."""
    return os.sep.join(line.split(os.sep)[-2:]) if os.sep in line else line


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join([f"{k} {v}" if isinstance(v, bool | str) else f"{k} {v:,}" for k, v in settings.items()])
