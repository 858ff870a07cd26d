"""The cost model that compares candidate schedules: it estimates a step's seconds on a device."""

import functools
import itertools
import math
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph._ir import (
    aten,
    collective_axes,
    collective_kind,
    collective_of,
    flops,
    full_bytes,
    group_size,
    is_carried,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    stand_ins_of,
    stand_ins_of_args,
    start_of,
)
from fzero.graph._ops import is_view
from fzero.graph._storages import is_move, on_host
from fzero.graph.loop._memory import pipeline_seconds
from fzero.graph.loop._scan import Loop, loop_of

__all__ = ["HARDWARE", "Hardware", "Route", "collective_seconds", "estimate_seconds", "message_seconds", "route_of"]

# The rates and latencies of the hardware that the cost model reads.


class Hardware(NamedTuple):
    """The hardware of a rank: the speeds of its device, of its host, and of the links of its mesh.

    Attributes:
        kind: torch's name of the device type: "cpu" or "cuda".
        flops: floating-point operations per second.
        memory: bytes per second that the device reads or writes in its memory.
        link: bytes per second that a rank sends, and at the same time receives, within its machine.
        latency: minimum seconds of a collective.
        launch: minimum seconds of an operation.
        network: bytes per second that a rank sends to other machines; each rank has its own network link.
        ranks_per_machine: the number of ranks on a machine. Their numbers are consecutive, so the mesh's last axis
            changes fastest.
        axes: the axes of the mesh with their sizes, as far as they are known.
        slow: the factor by which a matrix product takes longer if its operands are wider than half precision.
        host: bytes per second that the host reads or writes; 0 if the host's work is not counted or is this device's.
        host_link: bytes per second between the device and the host.
        hop: seconds that each step of a ring within a machine adds; counted only if `axes` are known.
        network_hop: seconds that each step of a ring between machines adds; counted only if `axes` are known.
        links: bytes per second along an axis, by the axis's name; they replace `link` and `network`.
        groups: the axes of each process group, by the group's name.
        product_flops: floating-point operations per second that no product of half precision exceeds; with 0, products
            and attention reach `flops` in any shape.
        half_depth: the inner dimension at which a product reaches half of `product_flops`.
        processors: the number of processors over which the tiles of a product are distributed; with 0 any shape fills
            them.
        attention_flops: floating-point operations per second of fused attention, all pairs counted.
        float8: the factor by which a product of float8 is faster than one of half precision.
    """

    kind: str
    flops: float
    memory: float
    link: float
    latency: float
    launch: float
    network: float = math.inf
    ranks_per_machine: float = math.inf
    axes: tuple[tuple[str, int], ...] = ()
    slow: float = 1.0
    host: float = 0.0
    host_link: float = 0.0
    hop: float = 0.0
    network_hop: float = 0.0
    links: tuple[tuple[str, float], ...] = ()
    groups: tuple[tuple[str, str], ...] = ()
    product_flops: float = 0.0
    half_depth: float = 0.0
    processors: int = 0
    attention_flops: float = 0.0
    float8: float = 1.0


HARDWARE = {
    "cpu": Hardware("cpu", flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one or two cores, gloo
    # a data-centre GPU with NVLink and PCIe 5; eight GPUs share a host
    "cuda": Hardware("cuda", flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6, host=6e10, host_link=5e10),
}


# The time of a collective: its bytes over the slowest link on the way, and a latency that grows with the ranks.


class Route(NamedTuple):
    """The distribution of a group's ranks over machines.

    Attributes:
        ranks: the number of ranks.
        local_ranks: the number of these ranks on the machine of the first one, itself included.
        machines: the number of machines.
    """

    ranks: int
    local_ranks: int
    machines: int


@functools.cache
def route_of(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], ranks_per_machine: float) -> Route:
    """Return how the ranks along some axes of a mesh are distributed over machines.

    Args:
        axes: the axes that a collective runs over.
        mesh: all axes with their sizes, the slowest first.
        ranks_per_machine: the number of ranks on a machine.
    """
    strides = dict[str, int]()
    stride = 1
    for name, size in reversed(mesh):
        strides[name] = stride
        stride *= size
    sizes = dict(mesh)
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in axes]
    machines = [
        0 if ranks_per_machine == math.inf else sum(starts) // int(ranks_per_machine)
        for starts in itertools.product(*steps)
    ]
    return Route(len(machines), machines.count(0), len(set(machines)))


def collective_seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the seconds that one collective of b bytes takes by itself, over n ranks on m machines.

    An all_gather and a reduce_scatter are rings of n - 1 steps, m - 1 of them between machines. They take
    `latency + (n - m) hop + (m - 1) network_hop + b (n - 1) / n / speed`. An all_reduce is two of these, or a tree
    through the machines if its latency is lower. Within a machine `speed` is `link`. Between machines it is at most
    `network` times the number of the group's ranks on a machine, since each rank has its own network link.

    In an all_to_all each rank sends a part to every other rank, over its own network link alone.

    References:
        The numbers of steps are those by which NCCL chooses an algorithm, in `src/graph/tuning.cc`.
    """
    total, kind = full_bytes(node), collective_kind(node)
    names = tuple([x for x in collective_axes(node, dict(hardware.groups)).split(",") if x])
    is_known = bool(names) and {*names} <= {name for name, _ in hardware.axes}
    if not is_known:
        n = group_size(node)
        share = (n - 1) / n if kind in ("all_gather", "reduce_scatter") else 2 if kind == "all_reduce" else 1
        return hardware.latency + total * share / (
            hardware.link if n <= hardware.ranks_per_machine else hardware.network
        )
    route = route_of(names, hardware.axes, hardware.ranks_per_machine)
    if route.ranks == 1:
        return hardware.latency
    limit = min([speed for name, speed in hardware.links if name in names], default=0.0)
    return (
        hardware.latency
        + _latency_seconds(kind, route, hardware)
        + _transfer_seconds(kind, total, route, hardware, limit)
    )


def message_seconds(size: int, axis: str, hardware: Hardware) -> float:
    """Estimate the seconds of a message of `size` bytes to the next rank along an axis, over the slowest link there."""
    is_known = axis in dict(hardware.axes)
    crosses_machines = is_known and route_of((axis,), hardware.axes, hardware.ranks_per_machine).machines > 1
    speed = dict(hardware.links).get(axis) or (hardware.network if crosses_machines else hardware.link)
    return hardware.latency + (hardware.network_hop if crosses_machines else hardware.hop) + size / speed


def _latency_seconds(kind: str, route: Route, hardware: Hardware) -> float:
    """Return the part of a collective's latency that grows with the number of ranks, in seconds."""
    n, _, m = route
    if kind == "all_to_all":  # all messages are sent at the same time
        return hardware.network_hop if m > 1 else hardware.hop
    ring = (n - m) * hardware.hop + (m - 1) * hardware.network_hop
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, (n / m - 1) * hardware.hop + math.ceil(math.log2(m)) * hardware.network_hop)


def _transfer_seconds(kind: str, total: float, route: Route, hardware: Hardware, limit: float) -> float:
    """Return the seconds that a collective's bytes take; a `limit` above 0 is the speed of its axis."""
    n, local_ranks, m = route
    if kind == "all_to_all":
        within, beyond = total * (local_ranks - 1) / n, total * (n - local_ranks) / n
        if limit:
            return (within + beyond) / limit
        return max(within / hardware.link, beyond / hardware.network)
    speed = limit or (hardware.link if m == 1 else min(hardware.link, local_ranks * hardware.network))
    times = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}
    return total * times.get(kind, 1.0) / speed


def estimate_seconds(graph: Graph, hardware: Hardware | None = None, first: bool = False) -> float:
    """Estimate the seconds of a graph, with one clock for the device's work, one for collectives and one for the host.

    Work takes `max(flops / hardware.flops, bytes / hardware.memory)` seconds, at least `hardware.launch`. A collective
    starts after the collectives before it, and takes `collective_seconds`. Work stops at a wait until the collective
    has ended.

    A copy of b bytes between device and host takes `b / host_link` seconds of the device's time, since copies are in
    the order of its work. The host computes at `hardware.host` bytes per second, as soon as its operands have arrived.

    Args:
        graph: a step, or the body of a loop.
        hardware: what the graph runs on; if its `host` is 0, the host's work and copies are not counted. By default
            common hardware of the kind that the values lie on; a CPU then does the host's work itself.
        first: whether the graph is a loop's first iteration, for which no earlier one has started a reduction.
    """
    clocks = _Clocks(graph, hardware)
    for node in graph.nodes:
        if is_carried(node) and not first:
            clocks.start_carried(node)
        clocks.run(node)
    return max(clocks.work, clocks.host.now)


class _Clocks:
    """The clocks of a graph's device, of its collectives and of its host. They advance operation by operation.

    Attributes:
        work: the time at which the device has finished all work so far, in seconds.
        wires: the time at which the last collective so far has ended, in seconds.
        ends: the time at which each collective ends, in seconds.
        host: the host's clock.
    """

    def __init__(self, graph: Graph, hardware: Hardware | None) -> None:
        self._body_hardware = hardware  # a loop's body is estimated as the graph is: None finds its own hardware
        self._hardware = _common_hardware(graph) if hardware is None else hardware
        self._excluded: Collection[Node] = () if hardware is None or self._hardware.host else _host_work(graph)
        self.host = _HostClock(on_host(graph.nodes) if self._hardware.host else set())
        self.work, self.wires = 0.0, 0.0
        self.ends: dict[Node, float] = {}

    def run(self, node: Node) -> None:
        """Advance the clocks by a node."""
        if node.op != "call_function" or is_view(node) or node in self._excluded:
            self.host.passes_on(node)
        elif is_collective(node):
            self._start(node)
        elif loop := loop_of(node):
            self.work = self.wires = max(self.work, self.wires) + self._loop_seconds(loop)
        elif is_wait(node):
            self.work = max(self.work, self.ends.get(start_of(node), 0.0))
        elif self._hardware.host and is_move(node):
            self._move(node)
        elif node in self.host.nodes:
            self.host.computes(node, _host_seconds(node, self._hardware))
        else:
            self.work += work_seconds(node, self._hardware)

    def start_carried(self, node: Node) -> None:
        """Start a reduction that the iteration before left in flight, unless it has started: it began at its end."""
        start = collective_of(node.meta["carried"])
        if start not in self.ends:
            self._start(start)

    def _start(self, node: Node) -> None:
        self.ends[node] = self.wires = max(self.work, self.wires) + collective_seconds(node, self._hardware)

    def _loop_seconds(self, loop: Loop) -> float:
        if loop.rank_schedule:
            message = partial(message_seconds, hardware=self._hardware)
            return pipeline_seconds(loop, partial(estimate_seconds, hardware=self._hardware), message)
        iteration = estimate_seconds(loop.body, self._body_hardware)
        first = estimate_seconds(loop.body, self._body_hardware, first=True) if loop.carried_count else iteration
        return first + (loop.iterations - 1) * iteration

    def _move(self, node: Node) -> None:
        self.work = max(self.work, self.host.arrival(node)) + nbytes(*stand_ins_of(node)) / self._hardware.host_link
        self.host.arrives(node, self.work)


@dataclass
class _HostClock:
    """The host's clock.

    Attributes:
        nodes: the nodes whose results lie in host memory.
        now: the time at which the host has finished all work so far, in seconds.
        ready: the time at which each node's result is ready, in seconds.
    """

    nodes: Set[Node]
    now: float = 0.0
    ready: dict[Node, float] = field(default_factory=dict)

    def arrival(self, node: Node) -> float:
        """Return the time at which all of a node's operands on the host are ready."""
        return max([self.ready.get(a, 0.0) for a in node.all_input_nodes], default=0.0)

    def arrives(self, node: Node, time: float) -> None:
        """Record the time at which a copy to the host is ready."""
        if node in self.nodes:
            self.ready[node] = time

    def passes_on(self, node: Node) -> None:
        """Record that a view is ready when its base is."""
        self.arrives(node, self.arrival(node))

    def computes(self, node: Node, seconds: float) -> None:
        """Advance the clock by an operation, which starts when the host is free and the operands are ready."""
        self.now = max(self.now, self.arrival(node)) + seconds
        self.ready[node] = self.now


def work_seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the seconds of one operation that is no collective."""
    operands = stand_ins_of_args(node)
    count = flops(node)
    compute = count / _rate(node, hardware) if count else 0.0
    if compute and hardware.slow != 1.0 and operands and operands[0].element_size() > 2:
        compute *= hardware.slow
    if _packet(node) is aten._scaled_mm:
        compute /= hardware.float8
    return max(compute, nbytes(*stand_ins_of(node), *operands) / hardware.memory, hardware.launch)


TILE = (128, 256)  # rows and columns of a result that one processor computes at a time
PRODUCTS = {
    aten.mm: 0,
    aten._scaled_mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
}  # the position of the first factor


def _rate(node: Node, hardware: Hardware) -> float:
    """Return the floating-point operations per second that an operation reaches by its shape."""
    packet = _packet(node)
    if not hardware.product_flops:
        return hardware.flops
    if packet not in PRODUCTS:  # fused attention, or a convolution
        return hardware.attention_flops if "attention" in str(packet) else hardware.product_flops
    factors = [a for a in node.args if isinstance(a, Node)][PRODUCTS[packet] :]
    (*batch, m, k), (*_, n) = [stand_ins_of(a)[0].shape for a in factors[:2]]
    return hardware.product_flops * k / (k + hardware.half_depth) * _filled(math.prod(batch), m, n, hardware.processors)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _filled(batch: int, m: int, n: int, processors: int) -> float:
    """Return the share of the processors' work that belongs to a result `[batch, m, n]`.

    Each processor computes one tile at a time. So the last tiles of a dimension, and the last wave of tiles, may not be
    full.
    """
    rows, columns = TILE
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors) * processors if processors else tiles
    return batch * m * n / (waves * rows * columns)


def _host_seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the seconds of one operation of the host."""
    return max(nbytes(*stand_ins_of(node), *stand_ins_of_args(node)) / hardware.host, hardware.launch)


def _host_work(graph: Graph) -> set[Node]:
    """Return the nodes that the device's clock does not count: the host's work, and copies."""
    return on_host(graph.nodes) | {n for n in graph.nodes if is_move(n)}


def _common_hardware(graph: Graph) -> Hardware:
    kinds = {x.device.type for n in graph.nodes if is_input(n) for x in stand_ins_of(n)}
    return HARDWARE["cuda" if "cuda" in kinds else "cpu"]
