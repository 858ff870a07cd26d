"""The cost model that ranks candidate schedules: seconds of a step on a device, roughly."""

import functools
import itertools
import math
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._ir import (
    axis_of,
    collective_of,
    flops,
    full_bytes,
    group_size,
    is_carried,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    start_of,
    values,
    values_of_args,
    wire,
)
from fzero.graph._ops import is_view
from fzero.graph._storages import is_move, on_host
from fzero.graph.loop._memory import pipeline_seconds
from fzero.graph.loop._scan import loop_of

__all__ = ["DEVICES", "Device", "Route", "collective_seconds", "message_seconds", "route_of", "seconds"]

# What a device can do, in the numbers that the cost model takes.


class Device(NamedTuple):
    """What a device can do.

    Attributes:
        kind: that torch gives it: "cpu" or "cuda".
        flops: floating-point operations a second.
        memory: bytes a second, read or written.
        link: bytes a second that a rank sends within the machine, and receives meanwhile.
        latency: seconds that a collective takes at least.
        launch: seconds that an operation takes at least.
        network: likewise to other machines, for each rank: it has a way out of its own.
        near: how many ranks a machine has. They follow one another, so the last axis of a mesh changes fastest.
        axes: of the mesh, each with its size, as far as they are known.
        slow: of operands that are wider than half precision, how many times as long a product takes.
        host: bytes a second that the host reads or writes; 0 if its work is not counted, or is this device's.
        host_link: bytes a second between the device and the host.
        hop: seconds that each step of a ring within the machine adds; counted where `axes` are known.
        far_hop: likewise from machine to machine.
        links: bytes a second along an axis, by its name, in place of `link` and `network`.
        groups: the axes of each process group, by its name.
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
    hop: float = 0.0
    far_hop: float = 0.0
    links: tuple[tuple[str, float], ...] = ()
    groups: tuple[tuple[str, str], ...] = ()


DEVICES = {
    "cpu": Device("cpu", flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one core or two, gloo
    # a data-centre GPU with NVLink, a host that eight share, PCIe 5
    "cuda": Device("cuda", flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6, host=6e10, host_link=5e10),
}


# What a collective takes: bytes over the slowest link on its way, and latency that grows with the ranks.


class Route(NamedTuple):
    """Where the ranks of a group are.

    Attributes:
        ranks: how many there are; 0 where nothing says so.
        near: how many of them the first one has on its machine, itself included.
        machines: on how many they are.
    """

    ranks: int
    near: int
    machines: int


@functools.cache
def route_of(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], near: float) -> Route:
    """Find the machines of the ranks along some axes of a mesh.

    Args:
        axes: that a collective runs over.
        mesh: all axes with their sizes, the slowest first.
        near: how many ranks a machine has.
    """
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    sizes = dict(mesh)
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in axes]
    machines = [0 if near == math.inf else sum(at) // int(near) for at in itertools.product(*steps)]
    return Route(len(machines), machines.count(0), len(set(machines)))


def collective_seconds(node: Node, device: Device) -> float:
    """Estimate how long one collective of b bytes in all takes by itself, over n ranks on m machines.

    An all_gather and a reduce_scatter are rings of n - 1 steps, m - 1 of them between machines. They take
    `latency + (n - m) hop + (m - 1) far_hop + b (n - 1) / n / speed`. An all_reduce is two of these. Its steps may also
    be those of a tree through the machines. Within a machine `speed` is `link`. Else it is at most `network` times the
    ranks of the group that a machine has, since each has a way out of its own.

    Of an all_to_all each rank sends its part to each other one, over its own way out alone.

    References:
        The steps are those of NCCL's own choice of an algorithm, `src/graph/tuning.cc`.
    """
    total, kind = full_bytes(node), wire(node)
    names = tuple([x for x in axis_of(node, dict(device.groups)).split(",") if x])
    known = bool(names) and {*names} <= {name for name, _ in device.axes}
    if not known:
        n = group_size(node)
        share = (n - 1) / n if kind in ("all_gather", "reduce_scatter") else 2 if kind == "all_reduce" else 1
        return device.latency + total * share / (device.link if n <= device.near else device.network)
    route = route_of(names, device.axes, device.near)
    if route.ranks == 1:
        return device.latency
    limit = min([speed for name, speed in device.links if name in names], default=0.0)
    return device.latency + _hops(kind, route, device) + _crossing(kind, total, route, device, limit)


def message_seconds(size: int, axis: str, device: Device) -> float:
    """Estimate how long a message of so many bytes takes to the next rank along an axis, over the slowest such way."""
    known = axis in dict(device.axes)
    far = known and route_of((axis,), device.axes, device.near).machines > 1
    speed = dict(device.links).get(axis) or (device.network if far else device.link)
    return device.latency + (device.far_hop if far else device.hop) + size / speed


def _hops(kind: str, route: Route, device: Device) -> float:
    """Return the latency that grows with the ranks."""
    n, _, m = route
    if kind == "all_to_all":  # all messages are on their way at once
        return device.far_hop if m > 1 else device.hop
    ring = (n - m) * device.hop + (m - 1) * device.far_hop
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, (n / m - 1) * device.hop + math.ceil(math.log2(m)) * device.far_hop)


def _crossing(kind: str, total: float, route: Route, device: Device, limit: float) -> float:
    """Return the seconds of the bytes, at the speed of an axis, if one was given as a `limit`."""
    n, near, m = route
    if kind == "all_to_all":
        within, beyond = total * (near - 1) / n, total * (n - near) / n
        if limit:
            return (within + beyond) / limit
        return max(within / device.link, beyond / device.network)
    speed = limit or (device.link if m == 1 else min(device.link, near * device.network))
    times = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return total * times.get(kind, 1.0) / speed


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
            work = wires = max(work, wires) + pipeline_seconds(
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
