"""plan: what a step will do, known before it runs: its order, live bytes, collectives."""

import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._notebook import shown
from fzero._torch import line_of
from fzero.graph._wire import axis_of, elements, wire
from fzero.graph.ir import flops, is_collective, nbytes, values
from fzero.graph.loops import loop_of
from fzero.graph.ops import name_of, title_of
from fzero.graph.plan import _picture, _text
from fzero.graph.plan._cost import Device, seconds
from fzero.graph.plan._layers import layers
from fzero.graph.plan._listed import listed, listed_ranges
from fzero.graph.plan._liveness import KINDS, Range, live_bytes
from fzero.graph.plan._phases import phases
from fzero.graph.plan._track import Sent, sent_by
from fzero.graph.spaces import is_move

__all__ = ["Collective", "Operation", "Plan", "Rejected", "Settings", "Transfer"]

SPACES = ("device", "host")


class Operation(NamedTuple):
    """One operation of a plan.

    Attributes:
        name: of its value in the graph, "mm_3".
        target: the function, "aten.mm.default"; of an argument its name.
        line: the source line that it was traced from.
        flops: how many floating-point operations it takes.
        times: how often it runs: more than once in a loop over micro-batches.
        phase: "forward", "backward" or "update".
    """

    name: str
    target: str
    line: str
    flops: int
    times: int = 1
    phase: str = "forward"

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
        unit: whose parameters or gradients it moves; units of one bucket joined by " + ". Of one of yours that
            moves rows, as tokens to experts and activations along "tp", the unit of the parameters that they meet;
            "(metric)" for others.
        elements: of the full buffer, an all_reduce's counted twice.
        bytes: of those elements.
        times: how often it runs: more than once in a loop over micro-batches.
        axis: of the mesh, or several joined by commas; "" where the group of ranks has another name.
    """

    position: int
    kind: str
    unit: str
    elements: int
    bytes: int
    times: int = 1
    axis: str = ""


class Transfer(NamedTuple):
    """A copy from one memory to the other.

    Attributes:
        position: of the operation.
        kind: "to_host" or "to_device".
        bytes: that it copies.
        times: how often it runs: more than once in a loop over micro-batches.
    """

    position: int
    kind: str
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
        transfers: the copies from the device to the host and back, in order.
        messages: what the rank sends to others of its pipeline.
    """

    name: str
    operations: tuple[Operation, ...]
    ranges: tuple[Range, ...]
    collectives: tuple[Collective, ...]
    settings: Settings
    seconds: float
    rejected: tuple[Rejected, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    messages: tuple[Sent, ...] = ()

    @property
    def steps(self) -> tuple[Operation, ...]:
        """The old name of `operations`, until version 0.3."""
        warnings.warn("a plan's steps are its operations", DeprecationWarning, stacklevel=2)
        return self.operations

    @cached_property
    def live(self) -> list[int]:
        """Bytes of the device alive while each operation runs, arguments included."""
        return self.live_in("device")

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the device that are alive at any time, arguments included: `peak_of("device")`."""
        return max(self.live, default=0)

    def live_in(self, space: str) -> list[int]:
        """Bytes of a memory, "device" or "host", alive while each operation runs, arguments included.

        Raises:
            ValueError: if `space` is neither.
        """
        if space not in SPACES:
            raise ValueError(f"space={space!r}: expected one of {SPACES}")
        return live_bytes([r for r in self.ranges if r.space == space], len(self.operations))

    def peak_of(self, space: str) -> int:
        """Return the most bytes of a memory, "device" or "host", that are alive at any time, arguments included.

        Raises:
            ValueError: if `space` is neither.
        """
        return max(self.live_in(space), default=0)

    @property
    def peak_at(self) -> int:
        """The position of the operation during which the peak is first reached."""
        return self.live.index(self.peak_bytes) if self.live else 0

    @property
    def argument_bytes(self) -> int:
        """Bytes of the step's arguments on the device."""
        return sum(r.bytes for r in self.ranges if r.start < 0 and r.space == "device")

    @property
    def added_bytes(self) -> int:
        """The most that the step holds at any time beside its arguments."""
        return self.peak_bytes - self.argument_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention."""
        return sum(o.flops * o.times for o in self.operations)

    def alive(self, position: int) -> list[Range]:
        """List the storages, of both memories, that are alive while an operation runs, the largest first."""
        return sorted((r for r in self.ranges if r.start <= position <= r.stop), key=lambda r: (-r.bytes, r.start))

    def live_of(self, kind: str, space: str = "device") -> list[int]:
        """Bytes of one kind in a memory alive while each operation runs: "parameters", "gathered", "gradients", ...

        Raises:
            ValueError: if `kind` is none.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(map(repr, KINDS))}")
        return live_bytes([r for r in self.ranges if r.kind == kind and r.space == space], len(self.operations))

    def __repr__(self) -> str:
        return f"Plan({_text.headline(self)})"

    def __str__(self) -> str:
        return _text.summary(self)

    def details(self) -> str:
        """Say all that is known: what is alive at the peak, by leaf and line, each collective, rejected schedules."""
        return _text.details(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw live bytes over the step, by kind, with its passes and collectives, into an image file (matplotlib).

        Args:
            path: of the file: its ending says the format, such as ".png" or ".svg".
        """
        _picture.draw(self).savefig(path, dpi=120)

    def _repr_html_(self) -> str:
        return shown(_text.summary(self), "live bytes over the step", lambda: _picture.draw(self))

    def to_json(self) -> str:
        """Write the plan as JSON: its fields, and peak_bytes, peak_at, argument_bytes and live."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["settings"] = _finite(self.settings)
        fields["rejected"] = [(_finite(settings), peak, time) for settings, peak, time in self.rejected]
        for name in ("operations", "ranges", "collectives", "transfers", "messages"):
            fields[name] = [x._asdict() for x in fields[name]]
        totals = {name: getattr(self, name) for name in ("peak_bytes", "peak_at", "argument_bytes", "flops", "live")}
        totals["host_peak_bytes"] = self.peak_of("host")
        return json.dumps({**fields, **totals})


def plan_of(
    graph: Graph,
    name: str,
    settings: Settings,
    rejected: Iterable[Rejected] = (),
    device: Device | None = None,
    groups: Mapping[str, str] | None = None,
) -> Plan:
    """Make the plan of a scheduled graph.

    Args:
        graph: the step, scheduled.
        name: of the step.
        settings: of its schedule.
        rejected: the other schedules.
        device: whose seconds it tells; by default that which its values lie on.
        groups: the axes of each process group, by its name.
    """
    found, of = listed(graph), phases(graph)
    named = layers(graph)
    return Plan(
        name,
        tuple([_operation(n, times, of[n]) for n, times in found]),
        tuple(listed_ranges(graph)),
        tuple([_collective(i, *found[i], named, groups) for i, (n, _) in enumerate(found) if is_collective(n)]),
        settings,
        seconds(graph, device),
        tuple(rejected),
        tuple([Transfer(i, name_of(n), nbytes(*values(n)), times) for i, (n, times) in enumerate(found) if is_move(n)]),
        tuple([m for i, (n, _) in enumerate(found) if (loop := loop_of(n)) and loop.track for m in sent_by(loop, i)]),
    )


def _operation(node: Node, times: int, phase: str) -> Operation:
    loop = loop_of(node)
    target = (
        title_of(node) if loop is None else f"a {'loop' if loop.track is None else 'pipeline'} of {loop.turns} turns"
    )
    return Operation(node.name, target, line_of(node), flops(node), times, phase)


def _collective(
    position: int, node: Node, times: int, named: Mapping[Node, str], groups: Mapping[str, str] | None
) -> Collective:
    n, width = elements(node), values(node)[0].element_size()
    layer = named.get(node) or node.meta.get("unit", "")
    return Collective(position, wire(node), layer, n, n * width, times, axis_of(node, groups))


def _finite(settings: Settings) -> dict[str, bool | int | float | str | None]:
    return {k: None if v == float("inf") else v for k, v in settings.items()}
