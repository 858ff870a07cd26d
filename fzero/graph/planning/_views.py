"""The views of a plan: a summary, all details as text, and a figure of live bytes, passes and collectives."""

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fzero._format import format_bytes
from fzero._report import new_figure
from fzero.graph.ir import METRIC
from fzero.graph.planning._phases import PHASES
from fzero.graph.planning.memory import KINDS

if TYPE_CHECKING:
    from fzero.graph.planning._plan import Plan

__all__ = ["details", "draw", "headline", "phase_spans", "short_path", "summary"]


_LABELED = ("gathered", "activations", "gradients", "buffers")  # the kinds whose largest value the summary names


def headline(plan: "Plan") -> str:
    """Return the line that gives the peak memory."""
    parts = f"{format_bytes(plan.argument_bytes)} of arguments + {format_bytes(plan.added_bytes)}"
    host = plan.peak_of("host")
    return f"{plan.name}: peak {format_bytes(plan.peak_bytes)} = {parts}" + (
        f"; on the host {format_bytes(host)}" if host else ""
    )


def summary(plan: "Plan") -> str:
    """Return about ten lines on the live values at the peak and on communication; repeated blocks share a line."""
    lines = [headline(plan)]
    if plan.operations:
        operation = plan.operations[plan.peak_at]
        phase = operation.phase if operation.phase == "update" else f"{operation.phase} pass"
        lines.append(
            f"alive at the peak, in the {phase} ({operation.target}, {short_path(operation.line) or 'no line'}):"
        )
        for kind, by_label in _live_at_peak(plan):
            label, size = by_label.most_common(1)[0]
            largest = f", {format_bytes(size)} of it {label}" if kind in _LABELED and label else ""
            lines.append(f"  {format_bytes(sum(by_label.values())):>10}  {kind}{largest}")
    if plan.workspace_bytes:
        lines.append(f"beside the peak: {format_bytes(plan.workspace_bytes)} workspace of matrix products")
    if plan.device_type == "cuda":
        reserved_bytes, expanding = [
            format_bytes(plan.allocator_peaks(expandable_segments=x).reserved_bytes) for x in (False, True)
        ]
        lines.append(f"torch's caching allocator reserves {reserved_bytes}, with expandable segments {expanding}")
    communicated_bytes, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    if count:
        lines.append(f"{count} collectives move {format_bytes(communicated_bytes)}:")
        lines += _group_lines(plan)
    if plan.messages:
        messages, bytes_ = sum([m.times for m in plan.messages]), sum([m.bytes * m.times for m in plan.messages])
        lines.append(f"{messages} messages along {plan.messages[0].axis} send {format_bytes(bytes_)}")
    if plan.transfers:
        to_host_bytes, to_device_bytes = (
            sum(t.bytes * t.times for t in plan.transfers if t.kind == k) for k in ("to_host", "to_device")
        )
        lines.append(
            f"{len(plan.transfers)} transfers: {format_bytes(to_host_bytes)} to the host, "
            f"{format_bytes(to_device_bytes)} to the device"
        )
    rejected_text = f"; {len(plan.rejected)} other schedules were rejected" if plan.rejected else ""
    lines.append(f"{_work_text(plan)}{rejected_text}; details() lists all")
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
                by_label[short_path(r.label)] += r.bytes
        if sum(by_label.values()):
            yield kind, by_label


def _group_lines(plan: "Plan") -> list[str]:
    """Return one line for the collectives of each kind and pass, whose units are folded."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for c in plan.collectives:
        phase = "" if c.unit.startswith(METRIC) else plan.operations[c.position].phase
        groups.setdefault((phase, c.kind), []).append(c)
    lines = []
    order = (*PHASES, "")
    for (phase, kind), group in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        times, bytes_ = sum(c.times for c in group), sum(c.bytes * c.times for c in group)
        units = _fold_names([unit for c in group for unit in c.unit.split(" + ")])
        lines.append(f"  {phase:<8}  {times:>4} x {kind:<14}  {format_bytes(bytes_):>10}  {units}")
    return lines


def _fold_names(units: list[str]) -> str:
    """Return the names of units as text; units that differ only in a number are one name, such as "blocks.*"."""
    by_pattern: dict[str, set[str]] = {}
    for unit in units:
        by_pattern.setdefault(re.sub(r"\d+", "*", unit), set()).add(unit)
    names = [pattern if len(members) > 1 else next(iter(members)) for pattern, members in by_pattern.items()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def details(plan: "Plan") -> str:
    """Return all details: live values at the peak by leaf and line, each collective in order, and the schedules."""
    communicated_bytes, count = sum(c.bytes * c.times for c in plan.collectives), sum(c.times for c in plan.collectives)
    lines = [headline(plan), f"{_work_text(plan)}; {count} collectives move {format_bytes(communicated_bytes)}"]
    lines.append("schedule: " + _settings_text(plan.settings))
    for settings, peak, time in plan.rejected:
        lines.append(f"  rejected: {format_bytes(peak)}, {time:.3g} s with {_settings_text(settings)}")
    return "\n".join([*lines, "", *_peak_lines(plan), "", *_collective_lines(plan)])


def _peak_lines(plan: "Plan") -> list[str]:
    """Return the lines of a plan's text that show what is live at the peak, by kind and label."""
    if not plan.operations:
        return []
    operation = plan.operations[plan.peak_at]
    lines = [
        f"alive at the peak, in operation {plan.peak_at} "
        f"({operation.target}, {short_path(operation.line) or 'no line'}):"
    ]
    for kind, by_label in _live_at_peak(plan):
        lines.append(f"  {format_bytes(sum(by_label.values())):>10}  {kind}")
        lines += [
            f"  {'':>10}  {format_bytes(bytes_):>10}  {label}" for label, bytes_ in by_label.most_common(4) if bytes_
        ]
        if len(by_label) > 4:
            lines.append(f"  {'':>10}  {'':>10}  and {len(by_label) - 4} more")
    return lines


def _collective_lines(plan: "Plan") -> list[str]:
    """Return one line per collective, in order, with the work and the peak since the collective before."""
    lines = [f"{'operation':>9}  {'collective':<14}  {'bytes':>10}  {'GFLOP before':>12}  {'peak before':>11}  unit"]
    previous_position = 0
    for c in plan.collectives:
        work = sum(o.flops * o.times for o in plan.operations[previous_position : c.position]) / 1e9
        peak = max(plan.live[previous_position : c.position + 1], default=0)
        times = f" ({c.times} times)" if c.times > 1 else ""
        lines.append(
            f"{c.position:>9}  {c.kind:<14}  {format_bytes(c.bytes):>10}  {work:>12,.2f}  {format_bytes(peak):>11}  "
            f"{c.unit}{times}"
        )
        previous_position = c.position + 1
    work = sum(o.flops * o.times for o in plan.operations[previous_position:]) / 1e9
    peak = max(plan.live[previous_position:], default=0)
    return [*lines, f"{len(plan.operations):>9}  {'the end':<14}  {'':>10}  {work:>12,.2f}  {format_bytes(peak):>11}"]


def short_path(line: str) -> str:
    """Shorten the path of a source line to its last two parts."""
    return os.sep.join(line.split(os.sep)[-2:]) if os.sep in line else line


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join([f"{k} {v}" if isinstance(v, bool | str) else f"{k} {v:,}" for k, v in settings.items()])


_LETTERS_PER_LINE = 120  # that fit side by side over the width of the figure
_MARKERS = {"all_gather": "v", "reduce_scatter": "^", "all_reduce": "d", "to_host": "v", "to_device": "^"}


def draw(plan: "Plan") -> Any:
    """Draw a plan as a matplotlib figure; host memory is drawn below, with the copies to the host and back."""
    offloads = bool(plan.peak_of("host"))
    figure = new_figure(11, 8 if offloads else 5)
    rows = figure.subplots(1 + offloads, 1, squeeze=False, sharex=True)[:, 0]
    _draw_memory(plan, rows[0], "device", [(c.kind, c.position) for c in plan.collectives])
    if offloads:
        _draw_memory(plan, rows[1], "host", [(t.kind, t.position) for t in plan.transfers])
    top = plan.peak_bytes / 1e6
    for start, stop, name in phase_spans(plan):
        for axes in rows:
            if start:
                axes.axvline(start, color="black", linewidth=0.6)
        letters = round(_LETTERS_PER_LINE * (stop - start) / len(plan.operations))
        if letters >= max(map(len, name.split())):
            rows[0].text(
                (start + stop) / 2, 1.13 * top, textwrap.fill(name, letters), ha="center", va="center", fontsize=9
            )
    rows[-1].set(xlabel="operation", xlim=(0, max(len(plan.operations) - 1, 1)))
    on_host = f", {format_bytes(plan.peak_of('host'))} on the host" if offloads else ""
    rows[0].set(title=f"{plan.name}: peak {format_bytes(plan.peak_bytes)}{on_host}")
    return figure


def _draw_memory(plan: "Plan", axes: Any, space: str, marks: Iterable[tuple[str, int]]) -> None:
    """Draw the live bytes of a memory by kind, and the collectives or copies above them."""
    kinds = [k for k in KINDS if any(r.kind == k and r.space == space for r in plan.ranges)]
    colors = [f"C{KINDS.index(k)}" for k in kinds]  # a kind has the same color in both memories
    live = [[x / 1e6 for x in plan.live_of(k, space)] for k in kinds]
    axes.stackplot(range(len(plan.operations)), live, labels=kinds, colors=colors, step="post")
    top, moves = plan.peak_of(space) / 1e6, list(marks)
    for kind, marker in _MARKERS.items():
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


def phase_spans(plan: "Plan") -> Iterator[tuple[int, int, str]]:
    """Yield the start, stop and name of each pass; updates between gradients belong to the backward pass."""
    names = [o.phase if o.times == 1 else f"{o.phase}, {o.times} times" for o in plan.operations]
    last_positions = {name: i for i, name in enumerate(names)}
    current = ""
    with_updates = set[str]()
    for i, name in enumerate(names):
        is_interleaved = name.startswith("update") and current.startswith("backward") and i < last_positions[current]
        if is_interleaved:
            with_updates.add(current)
        current = current if is_interleaved else name
        names[i] = current
    start = 0
    for name, group in groupby(names):
        count = len(list(group))
        yield start, start + count, f"{name}, and updates" if name in with_updates else name
        start += count
