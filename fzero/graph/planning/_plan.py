"""plan: what a step will do, known before it runs: its order, live bytes, collectives."""

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._notebook import shown
from fzero._torch import line_of
from fzero.graph._ir import axis_of, elements, flops, is_collective, is_input, nbytes, values, wire
from fzero.graph._ops import name_of, title_of
from fzero.graph._storages import is_move
from fzero.graph.loop._memory import SentMessage, sent_messages
from fzero.graph.loop._scan import Loop, loop_of
from fzero.graph.planning import _picture, _text
from fzero.graph.planning._cost import Device, seconds
from fzero.graph.planning._liveness import A_TURN, KINDS, Range, live_bytes, live_ranges, ranges_of_a_turn
from fzero.graph.planning._phases import phases
from fzero.sharding import default_units

__all__ = [
    "Collective",
    "Listed",
    "Operation",
    "Plan",
    "Rejected",
    "Settings",
    "Transfer",
    "layers",
    "listed",
    "listed_ranges",
]

# Which layer a user's collective belongs to: found by the parameters that its values meet.


METRIC = "(metric)"


def layers(graph: Graph, given: Mapping[Node, str] | None = None) -> dict[Node, str]:
    """Name the layer of each collective that moves values of one, such as tokens to experts; in loops' bodies, too.

    It is the layer of the nearest operation, before or after the collective, that applies a parameter: rows go straight
    to their experts, and come straight from them. So do activations of layers that are cut along "tp". Of no layer are
    a metric and a loss, which are numbers and no matrices.

    Args:
        graph: a scheduled graph.
        given: of a loop's body the arguments that hold parameters, and their units.
    """
    weights, applied = _weights(graph, given or {})
    found: dict[Node, str] = {}
    for n in graph.nodes:
        if is_collective(n) and n.meta.get("unit") == METRIC and _moves_values(n):
            name = _nearest(n, applied)
            found |= {n: name} if name else {}
        elif loop := loop_of(n):
            _, *inside = [m for m in loop.body.nodes if is_input(m)]  # the first is the number of the turn
            held = {m: weights[a] for m, a in zip(inside, n.args, strict=False) if isinstance(a, Node) and a in weights}
            found |= layers(loop.body, held)
    return found


def _moves_values(node: Node) -> bool:
    """Return whether a collective moves rows: an exchange does, and what is a matrix or more."""
    return "all_to_all" in str(node.target) or values(node)[0].dim() >= 2


def _weights(graph: Graph, given: Mapping[Node, str]) -> tuple[dict[Node, str], dict[Node, str]]:
    """Find what holds parameters and nothing else, and what applies them to something; with their units."""
    weights, applied = dict(given), dict[Node, str]()
    for n in graph.nodes:
        inputs = n.all_input_nodes
        held = [weights[a] for a in inputs if a in weights]
        if is_input(n):
            weights |= _parameter(n)
        elif held and len(held) == len(inputs):
            unit = n.meta.get("unit", METRIC)  # a gather has one, and each part of a bucket its own
            weights[n] = held[0] if unit == METRIC else unit
        elif held:
            applied[n] = held[0]
    return weights, applied


def _parameter(node: Node) -> dict[Node, str]:
    named = re.search(r"(leaf|unit) '(.+)'", node.meta.get("label", ""))
    if node.meta.get("kind") != "parameters" or named is None:
        return {}
    return {node: default_units(named[2], node.meta["val"]) if named[1] == "leaf" else named[2]}


def _nearest(node: Node, applied: Mapping[Node, str]) -> str:
    """Go from a node to those before and after it, and on in both directions, until one applies a parameter."""
    before, after, seen = [node], [node], {node}
    while before or after:
        before = [m for n in before for m in n.all_input_nodes if m not in seen]
        after = [m for n in after for m in n.users if m not in seen]
        seen.update(before, after)
        for n in [*after, *before]:
            if n in applied:
                return applied[n]
    return ""


# A scheduled graph as a plan lists it: the operations of a loop's body follow the loop, once, as one of its turns.


class Listed(NamedTuple):
    """An operation in a plan, and how often it runs."""

    node: Node
    times: int


def listed(graph: Graph) -> list[Listed]:
    """List a graph's operations, arguments included, and behind each loop those of its body."""
    found = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        found.append(Listed(node, 1))
        if loop := loop_of(node):
            found += [Listed(n, loop.turns) for n in loop.body.nodes if n.op == "call_function"]
    return found


def listed_ranges(graph: Graph) -> list[Range]:
    """Find when each storage is alive, by the positions of the operations that `listed` lists."""
    first: list[int] = []  # of each node, its position in the list, and that of the last operation of its body
    last: list[int] = []
    inside: list[Range] = []
    for node in graph.nodes:
        at, loop = last[-1] + 1 if last else 0, loop_of(node)
        turn = [] if loop is None else _ranges_in(loop)
        first.append(at)
        last.append(at + (0 if loop is None else _length(loop)))
        inside += [r._replace(start=at + r.start, stop=at + r.stop) for r in turn]
    last.append(last[-1] + 1)
    around = [r for r in live_ranges(graph) if r.label != A_TURN]
    return inside + [r._replace(start=first[r.start] if r.start >= 0 else -1, stop=last[r.stop]) for r in around]


def _length(loop: Loop) -> int:
    return sum(n.op == "call_function" for n in loop.body.nodes)


def _ranges_in(loop: Loop) -> list[Range]:
    """Find when each storage of a turn is alive, counted from the loop's own position."""
    before, most = sum(is_input(n) for n in loop.body.nodes) - 1, _length(loop)

    def place(i: int) -> int:
        return min(max(i - before, 0), most)

    return [r._replace(start=place(r.start), stop=place(r.stop)) for r in ranges_of_a_turn(loop)]


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
    messages: tuple[SentMessage, ...] = ()

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
        tuple(
            [m for i, (n, _) in enumerate(found) if (loop := loop_of(n)) and loop.track for m in sent_messages(loop, i)]
        ),
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
