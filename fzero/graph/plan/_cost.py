"""The cost model that ranks candidate schedules: seconds of a step on a device, roughly."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._wire import full_bytes, group_size, wire
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
from fzero.graph.spaces import is_move, on_host

__all__ = ["DEVICES", "Device", "seconds"]


class Device(NamedTuple):
    """What a device can do.

    Attributes:
        flops: floating-point operations a second.
        memory: bytes a second, read or written.
        link: bytes a second that a collective moves.
        latency: seconds that a collective takes at least.
        launch: seconds that an operation takes at least.
        host: bytes a second that the host reads or writes; 0 where device and host are one.
        host_link: bytes a second between the device and the host.
    """

    flops: float
    memory: float
    link: float
    latency: float
    launch: float
    host: float = 0
    host_link: float = 0


DEVICES = {
    "cpu": Device(flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one core or two, gloo
    # a data-centre GPU with NVLink, a host that eight share, PCIe 5
    "cuda": Device(flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6, host=6e10, host_link=5e10),
}


def seconds(graph: Graph, first: bool = False, device: Device | None = None) -> float:
    """Estimate how long a graph runs: work on one clock, collectives on another, and the host on a third.

    Work takes `max(flops / device.flops, bytes / device.memory)`, at least `device.launch`. A collective of b bytes in
    all over n ranks starts after those before it. It takes `latency + b (n - 1) / n / link`; an all_reduce sends twice
    that. Work stands still at a wait whose collective has not ended.

    A copy between the device and its host takes the device's time, `b / host_link`: it stands in the order of its work.
    The host computes what it is given as soon as that is there, at `device.host` bytes a second.

    Args:
        graph: a step, or the body of a loop.
        first: whether it is a loop's first turn, which no turn has left a reduction to.
        device: that runs it; by default as the graph's inputs say.
    """
    device = device or _device(graph)
    work, wires = 0.0, 0.0
    ends: dict[Node, float] = {}
    host = _Host(on_host(graph.nodes) if device.host else set())
    for node in graph.nodes:
        if is_carried(node) and not first:  # it began at the end of the turn before
            start = collective_of(node.meta["carried"])
            if start not in ends:
                ends[start] = wires = max(work, wires) + collective_seconds(start, device)
        if node.op != "call_function" or is_view(node):
            host.passes_on(node)
            continue
        if is_collective(node):
            wires = max(work, wires) + collective_seconds(node, device)
            ends[node] = wires
        elif loop := loop_of(node):
            turn = seconds(loop.body, device=device)
            begin = seconds(loop.body, first=True, device=device) if loop.carried else turn
            work = wires = max(work, wires) + begin + (loop.turns - 1) * turn
        elif is_wait(node):
            work = max(work, ends.get(start_of(node), 0.0))
        elif device.host and is_move(node):
            work = max(work, host.arrival(node)) + nbytes(*values(node)) / device.host_link
            host.arrives(node, work)
        elif node in host.nodes:
            host.computes(node, nbytes(*values(node), *values_of_args(node)) / device.host)
        else:
            moved = nbytes(*values(node), *values_of_args(node))
            work += max(flops(node) / device.flops, moved / device.memory, device.launch)
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


def collective_seconds(node: Node, device: Device) -> float:
    """Estimate how long one collective takes by itself."""
    total, n = full_bytes(node), group_size(node)
    kind = wire(node)
    crossing = total * (n - 1) / n if kind in ("all_gather", "reduce_scatter") else total  # the others tell no n
    crossing = 2 * total if kind == "all_reduce" else crossing
    return device.latency + crossing / device.link


def _device(graph: Graph) -> Device:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in values(n)}
    return DEVICES["cuda" if "cuda" in kinds else "cpu"]
