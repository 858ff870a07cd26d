"""The cost model that ranks candidate schedules: seconds of a step on a device, roughly."""

from collections.abc import Collection, Set
from dataclasses import dataclass, field
from functools import partial

from torch.fx import Graph, Node

from fzero.graph.ir import (
    collective_of,
    flops,
    is_carried,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    start_of,
    values,
    values_of_args,
)
from fzero.graph.loops import loop_of
from fzero.graph.ops import is_view
from fzero.graph.plan._device import DEVICES, Device
from fzero.graph.plan._links import collective_seconds, message_seconds
from fzero.graph.plan._track import track_seconds
from fzero.graph.spaces import is_move, on_host

__all__ = ["DEVICES", "Device", "seconds"]


def seconds(graph: Graph, device: Device | None = None, first: bool = False) -> float:
    """Estimate how long a graph runs: work on one clock, collectives on another, and the host on a third.

    Work takes `max(flops / device.flops, bytes / device.memory)`, at least `device.launch`. A collective starts after
    those before it, and takes what `collective_seconds` says. Work stands still at a wait whose collective has not
    ended.

    A copy between the device and its host takes the device's time, `b / host_link`: it stands in the order of its work.
    The host computes what it is given as soon as that is there, at `device.host` bytes a second.

    Args:
        graph: a step, or the body of a loop.
        device: that it runs on; one that says no `host` leaves out what the host does and copies. By default a common
            one of the kind that its values lie on, and on a CPU all is its own work.
        first: whether it is a loop's first turn, which no turn has left a reduction to.
    """
    on = _device(graph) if device is None else device
    beside: Collection[Node] = () if device is None or on.host else _of_the_host(graph)
    host = _Host(on_host(graph.nodes) if on.host else set())
    work, wires = 0.0, 0.0
    ends: dict[Node, float] = {}
    for node in graph.nodes:
        if is_carried(node) and not first:  # it began at the end of the turn before
            start = collective_of(node.meta["carried"])
            if start not in ends:
                ends[start] = wires = max(work, wires) + collective_seconds(start, on)
        if node.op != "call_function" or is_view(node) or node in beside:
            host.passes_on(node)
            continue
        if is_collective(node):
            wires = max(work, wires) + collective_seconds(node, on)
            ends[node] = wires
        elif (loop := loop_of(node)) and loop.track:
            work = wires = max(work, wires) + track_seconds(
                loop, partial(seconds, device=on), partial(message_seconds, device=on)
            )
        elif loop:
            turn = seconds(loop.body, device)
            begin = seconds(loop.body, device, first=True) if loop.carried else turn
            work = wires = max(work, wires) + begin + (loop.turns - 1) * turn
        elif is_wait(node):
            work = max(work, ends.get(start_of(node), 0.0))
        elif on.host and is_move(node):
            work = max(work, host.arrival(node)) + nbytes(*values(node)) / on.host_link
            host.arrives(node, work)
        elif node in host.nodes:
            host.computes(node, max(nbytes(*values(node), *values_of_args(node)) / on.host, on.launch))
        else:
            work += work_seconds(node, on)
    return max(work, host.now)


@dataclass
class _Host:
    """The host's clock.

    Attributes:
        nodes: whose results lie in host memory.
        now: when the host has computed all so far, in seconds.
        known: when each of the nodes' results is there.
    """

    nodes: Set[Node]
    now: float = 0.0
    known: dict[Node, float] = field(default_factory=dict)

    def arrival(self, node: Node) -> float:
        """Return when all that a node is given from the host is there."""
        return max([self.known.get(a, 0.0) for a in node.all_input_nodes], default=0.0)

    def arrives(self, node: Node, at: float) -> None:
        """Note when a copy to the host is there."""
        if node in self.nodes:
            self.known[node] = at

    def passes_on(self, node: Node) -> None:
        """Note that a view is there when what it views is."""
        self.arrives(node, self.arrival(node))

    def computes(self, node: Node, takes: float) -> None:
        """Let the host compute, as soon as it is free and all that it needs is there."""
        self.now = max(self.now, self.arrival(node)) + takes
        self.known[node] = self.now


def work_seconds(node: Node, device: Device) -> float:
    """Estimate how long one operation takes that is no collective."""
    read = values_of_args(node)
    done = flops(node) / device.flops
    if done and device.slow != 1.0 and read and read[0].element_size() > 2:
        done *= device.slow
    return max(done, nbytes(*values(node), *read) / device.memory, device.launch)


def _of_the_host(graph: Graph) -> set[Node]:
    """List what the device's clock leaves out."""
    return on_host(graph.nodes) | {n for n in graph.nodes if is_move(n)}


def _device(graph: Graph) -> Device:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in values(n)}
    return DEVICES["cuda" if "cuda" in kinds else "cpu"]
