"""The cost model that ranks candidate schedules: seconds of a step on a device, roughly."""

import math
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._wire import axis_of, full_bytes, group_size, wire
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
from fzero.graph.plan._track import track_seconds
from fzero.graph.spaces import is_move, on_host

__all__ = ["DEVICES", "Device", "seconds"]


class Device(NamedTuple):
    """What a device can do.

    Attributes:
        kind: that torch gives it: "cpu" or "cuda".
        flops: floating-point operations a second.
        memory: bytes a second, read or written.
        link: bytes a second that a collective moves.
        latency: seconds that a message takes at least.
        launch: seconds that an operation takes at least.
        network: bytes a second that a collective moves which leaves the machine.
        near: how many ranks a machine has.
        axes: of the mesh, each with its size, as far as they are known.
        slow: of operands that are wider than half precision, how many times as long a product takes.
        host: bytes a second that the host reads or writes; 0 if its work is not counted, or is this device's.
        host_link: bytes a second between the device and the host.
    """

    kind: str
    flops: float
    memory: float
    link: float
    latency: float
    launch: float
    network: float = math.inf
    near: float = math.inf
    axes: tuple[tuple[str, int], ...] = ()
    slow: float = 1.0
    host: float = 0.0
    host_link: float = 0.0


DEVICES = {
    "cpu": Device("cpu", flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one core or two, gloo
    # a data-centre GPU with NVLink, a host that eight share, PCIe 5
    "cuda": Device("cuda", flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6, host=6e10, host_link=5e10),
}


def seconds(graph: Graph, device: Device | None = None, first: bool = False) -> float:
    """Estimate how long a graph runs: work on one clock, collectives on another, and the host on a third.

    Work takes `max(flops / device.flops, bytes / device.memory)`, at least `device.launch`. A collective of b bytes in
    all over n ranks starts after those before it. It takes `latency + b (n - 1) / n / link`; an all_reduce sends twice
    that. Work stands still at a wait whose collective has not ended.

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
            work = wires = max(work, wires) + track_seconds(loop, lambda graph: seconds(graph, on), on.latency, on.link)
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
            host.computes(node, nbytes(*values(node), *values_of_args(node)) / on.host)
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


def collective_seconds(node: Node, device: Device) -> float:
    """Estimate how long one collective takes by itself, as a ring: each rank sends to the next, n - 1 times.

    Libraries go through fewer messages where they are small, as a tree: so latency grows with the logarithm of n.
    """
    total, kind = full_bytes(node), wire(node)
    n = math.prod([dict(device.axes).get(axis, 1) for axis in axis_of(node).split(",")])
    n = max(n, group_size(node))
    crossing = total * (n - 1) / n if kind in ("all_gather", "reduce_scatter") else total  # the others tell no n
    crossing = 2 * total if kind == "all_reduce" else crossing
    hops = 1.0 if not device.axes else max(math.log2(n), 1.0)
    return device.latency * hops + crossing / (device.link if n <= device.near else device.network)


def _of_the_host(graph: Graph) -> set[Node]:
    """List what the device's clock leaves out."""
    return on_host(graph.nodes) | {n for n in graph.nodes if is_move(n)}


def _device(graph: Graph) -> Device:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in values(n)}
    return DEVICES["cuda" if "cuda" in kinds else "cpu"]
