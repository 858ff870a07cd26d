"""plan: what a step will do, known before it runs: its order, live bytes, collectives."""

import dataclasses
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._torch import line_of
from fzero.graph._wire import elements, wire
from fzero.graph.ir import flops, is_collective, values
from fzero.graph.loops import loop_of
from fzero.graph.ops import title_of
from fzero.graph.plan._cost import seconds
from fzero.graph.plan._listed import listed, listed_ranges
from fzero.graph.plan._liveness import KINDS, Range, live_bytes

__all__ = ["Collective", "Operation", "Plan", "Rejected", "Settings"]


class Operation(NamedTuple):
    """One operation of a plan.

    Attributes:
        name: of its value in the graph, "mm_3".
        target: the function, "aten.mm.default"; of an argument its name.
        line: the source line that it was traced from.
        flops: how many floating-point operations it takes.
        times: how often it runs: more than once in a loop over micro-batches.
    """

    name: str
    target: str
    line: str
    flops: int
    times: int = 1

    @property
    def operation(self) -> str:
        """The old name of `target`, until version 0.3."""
        warnings.warn("an operation's operation is its target", DeprecationWarning, stacklevel=2)
        return self.target


Settings = Mapping[str, bool | int | float | str]  # the arguments of the passes, by name


class Rejected(NamedTuple):
    """A schedule that was not kept: its settings, its peak, and what the cost model says of it."""

    settings: Settings
    peak_bytes: int
    seconds: float


class Collective(NamedTuple):
    """One collective of a plan.

    Attributes:
        position: of the operation that starts it.
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        unit: whose parameters or gradients it moves; units of one bucket joined by " + "; "(metric)" for others.
        elements: of the full buffer, an all_reduce's counted twice.
        bytes: of those elements.
        times: how often it runs: more than once in a loop over micro-batches.
    """

    position: int
    kind: str
    unit: str
    elements: int
    bytes: int
    times: int = 1


@dataclass(frozen=True)
class Plan:
    """The schedule of one step, by the live ranges of its values.

    What a step holds beside them it cannot see: the workspaces of kernels, what a communication library copies. See
    docs/plan.md for measured sizes.

    Attributes:
        name: of the step.
        operations: in order.
        ranges: the storages, each with the positions between which it is alive, its size, kind and label.
        collectives: in order.
        settings: the arguments of the passes that made this schedule.
        seconds: what the cost model says; good to compare schedules, not to predict a machine.
        rejected: the schedules that were not kept.
    """

    name: str
    operations: tuple[Operation, ...]
    ranges: tuple[Range, ...]
    collectives: tuple[Collective, ...]
    settings: Settings
    seconds: float
    rejected: tuple[Rejected, ...] = ()

    @property
    def steps(self) -> tuple[Operation, ...]:
        """The old name of `operations`, until version 0.3."""
        warnings.warn("a plan's steps are its operations", DeprecationWarning, stacklevel=2)
        return self.operations

    @cached_property
    def live(self) -> list[int]:
        """Bytes alive while each operation runs, arguments included."""
        return live_bytes(self.ranges, len(self.operations))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at any time, arguments included."""
        return max(self.live, default=0)

    @property
    def peak_at(self) -> int:
        """The position of the operation during which the peak is first reached."""
        return self.live.index(self.peak_bytes) if self.live else 0

    @property
    def argument_bytes(self) -> int:
        """Bytes of the step's arguments."""
        return sum(r.bytes for r in self.ranges if r.start < 0)

    @property
    def added_bytes(self) -> int:
        """The most that the step holds at any time beside its arguments."""
        return self.peak_bytes - self.argument_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(o.flops * o.times for o in self.operations)

    def alive(self, position: int) -> list[Range]:
        """List the storages that are alive while the operation at `position` runs, the largest first."""
        return sorted((r for r in self.ranges if r.start <= position <= r.stop), key=lambda r: (-r.bytes, r.start))

    def live_of(self, kind: str) -> list[int]:
        """Bytes of one kind alive while each operation runs: "parameters", "gathered", "gradients", ...

        Raises:
            ValueError: if `kind` is none.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(map(repr, KINDS))}")
        return live_bytes([r for r in self.ranges if r.kind == kind], len(self.operations))

    def __repr__(self) -> str:
        return f"Plan({self._summary()[0]})"

    def __str__(self) -> str:
        return "\n".join([*self._summary(), "", *self._at_the_peak(), "", *self._order()])

    def _summary(self) -> list[str]:
        moved = sum(c.bytes * c.times for c in self.collectives)
        count = sum(c.times for c in self.collectives)
        lines = [
            f"{self.name}: peak {_size(self.peak_bytes)} = {_size(self.argument_bytes)} of arguments "
            f"+ {_size(self.added_bytes)}",
            f"{len(self.operations):,} operations, {self.flops / 1e9:,.2f} GFLOP; {count} collectives "
            f"move {_size(moved)}; {self.seconds:.3g} s by the cost model",
            "schedule: " + _shown(self.settings),
        ]
        return lines + [
            f"  not kept: {_size(peak)}, {time:.3g} s with {_shown(settings)}" for settings, peak, time in self.rejected
        ]

    def _at_the_peak(self) -> list[str]:
        if not self.operations:
            return []
        at = self.operations[self.peak_at]
        lines = [f"alive at the peak, in operation {self.peak_at} ({at.target}, {_short(at.line) or 'no line'}):"]
        alive = self.alive(self.peak_at)
        for kind in KINDS:
            same: Counter[str] = Counter()
            for r in alive:
                if r.kind == kind:
                    same[_short(r.label)] += r.bytes
            if sum(same.values()):
                lines.append(f"  {_size(sum(same.values())):>10}  {kind}")
                lines += [f"  {'':>10}  {_size(size):>10}  {label}" for label, size in same.most_common(4) if size]
                lines += [f"  {'':>10}  {'':>10}  and {len(same) - 4} more"] if len(same) > 4 else []
        return lines

    def _order(self) -> list[str]:
        lines = [
            f"{'operation':>9}  {'collective':<14}  {'bytes':>10}  {'GFLOP before':>12}  {'peak before':>11}  unit"
        ]
        before = 0
        for c in self.collectives:
            work = sum(o.flops * o.times for o in self.operations[before : c.position]) / 1e9
            peak = max(self.live[before : c.position + 1], default=0)
            lines.append(
                f"{c.position:>9}  {c.kind:<14}  {_size(c.bytes):>10}  {work:>12,.2f}  {_size(peak):>11}  {c.unit}"
                + (f" ({c.times} times)" if c.times > 1 else "")
            )
            before = c.position + 1
        work = sum(o.flops * o.times for o in self.operations[before:]) / 1e9
        peak = max(self.live[before:], default=0)
        return [*lines, f"{len(self.operations):>9}  {'the end':<14}  {'':>10}  {work:>12,.2f}  {_size(peak):>11}"]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw live bytes over the step, by kind, with its collectives, into an image file (needs matplotlib)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        kinds = [k for k in KINDS if any(r.kind == k for r in self.ranges)]
        rows = [[x / 1e6 for x in self.live_of(k)] for k in kinds]
        axes.stackplot(range(len(self.operations)), rows, labels=kinds, step="post")
        top = self.peak_bytes / 1e6
        for kind, marker in (("all_gather", "v"), ("reduce_scatter", "^"), ("all_reduce", "d")):
            at = [c.position for c in self.collectives if c.kind == kind]
            if at:
                axes.plot(at, [1.05 * top] * len(at), marker, color="black", markersize=4, label=kind, linestyle="none")
        axes.axhline(top, color="black", linewidth=0.8, linestyle="--")
        axes.set(
            xlabel="operation", xlim=(0, max(len(self.operations) - 1, 1)),
            ylabel="live, MB", ylim=(0, 1.12 * top or 1),
            title=f"{self.name}: peak {_size(self.peak_bytes)}",
        )  # fmt: skip
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, dpi=120)

    def to_json(self) -> str:
        """Write the plan as JSON: its fields, and peak_bytes, peak_at, argument_bytes and live."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["settings"] = _finite(self.settings)
        fields["rejected"] = [(_finite(settings), peak, time) for settings, peak, time in self.rejected]
        for name in ("operations", "ranges", "collectives"):
            fields[name] = [x._asdict() for x in fields[name]]
        totals = {name: getattr(self, name) for name in ("peak_bytes", "peak_at", "argument_bytes", "flops", "live")}
        return json.dumps({**fields, **totals})


def plan_of(graph: Graph, name: str, settings: Settings, rejected: Iterable[Rejected] = ()) -> Plan:
    """Make the plan of a scheduled graph."""
    found = listed(graph)
    return Plan(
        name,
        tuple([_operation(n, times) for n, times in found]),
        tuple(listed_ranges(graph)),
        tuple([_collective(i, n, times) for i, (n, times) in enumerate(found) if is_collective(n)]),
        settings,
        seconds(graph),
        tuple(rejected),
    )


def _operation(node: Node, times: int) -> Operation:
    target = f"a loop of {loop.turns} turns" if (loop := loop_of(node)) else title_of(node)
    return Operation(node.name, target, line_of(node), flops(node), times)


def _collective(position: int, node: Node, times: int) -> Collective:
    n, width = elements(node), values(node)[0].element_size()
    return Collective(position, wire(node), node.meta.get("unit", ""), n, n * width, times)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def _short(line: str) -> str:
    """Leave of a source line's path the last two parts."""
    return os.sep.join(line.split(os.sep)[-2:]) if os.sep in line else line


def _shown(settings: Settings) -> str:
    return ", ".join([f"{k} {v}" if isinstance(v, bool | str) else f"{k} {v:,}" for k, v in settings.items()])


def _finite(settings: Settings) -> dict[str, bool | int | float | str | None]:
    return {k: None if v == float("inf") else v for k, v in settings.items()}
