"""The cost of one operation, collective or message: the seconds that it takes by itself on some hardware."""

import functools
import itertools
import math
from typing import Any, NamedTuple

from torch.fx import Node

from fzero.graph._ir import (
    aten,
    collective_axes,
    collective_kind,
    flops,
    full_bytes,
    group_size,
    nbytes,
    stand_ins_of,
    stand_ins_of_args,
)

__all__ = [
    "HARDWARE",
    "Hardware",
    "Work",
    "collective_seconds",
    "message_seconds",
    "product_seconds",
    "transfer_seconds",
    "work_of",
]

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
        fuses: whether a compiler fuses elementwise operations: values between them are neither stored nor read, and
            each kernel is launched once. The compiler is that of the step, whose plan marks these values.
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
    fuses: bool = False


HARDWARE = {
    "cpu": Hardware("cpu", flops=5e10, memory=1e10, link=1e9, latency=1e-4, launch=2e-6),  # one or two cores, gloo
    # a data-centre GPU with NVLink and PCIe 5; eight GPUs share a host
    "cuda": Hardware("cuda", flops=4e14, memory=3e12, link=1e11, latency=2e-5, launch=4e-6, host=6e10, host_link=5e10),
}


# The time of a collective: its bytes over the slowest link on the way, and a latency that grows with the ranks.


class _Route(NamedTuple):
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
def _route_of(axes: tuple[str, ...], mesh: tuple[tuple[str, int], ...], ranks_per_machine: float) -> _Route:
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
    return _Route(len(machines), machines.count(0), len(set(machines)))


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
    route = _route_of(names, hardware.axes, hardware.ranks_per_machine)
    if route.ranks == 1:
        return hardware.latency
    limit = min([speed for name, speed in hardware.links if name in names], default=0.0)
    return (
        hardware.latency
        + _latency_seconds(kind, route, hardware)
        + _transfer_seconds(kind, total, route, hardware, limit)
    )


def transfer_seconds(kind: str, total: float, axes: tuple[str, ...], hardware: Hardware) -> float:
    """Return the seconds that the bytes of a collective over some axes of the mesh take, without any latency."""
    route = _route_of(axes, hardware.axes, hardware.ranks_per_machine)
    limit = min([speed for name, speed in hardware.links if name in axes], default=0.0)
    return 0.0 if route.ranks == 1 else _transfer_seconds(kind, total, route, hardware, limit)


def message_seconds(size: int, axis: str, hardware: Hardware) -> float:
    """Estimate the seconds of a message of `size` bytes to the next rank along an axis, over the slowest link there."""
    is_known = axis in dict(hardware.axes)
    crosses_machines = is_known and _route_of((axis,), hardware.axes, hardware.ranks_per_machine).machines > 1
    speed = dict(hardware.links).get(axis) or (hardware.network if crosses_machines else hardware.link)
    return hardware.latency + (hardware.network_hop if crosses_machines else hardware.hop) + size / speed


def _latency_seconds(kind: str, route: _Route, hardware: Hardware) -> float:
    """Return the part of a collective's latency that grows with the number of ranks, in seconds."""
    n, _, m = route
    if kind == "all_to_all":  # all messages are sent at the same time
        return hardware.network_hop if m > 1 else hardware.hop
    ring = (n - m) * hardware.hop + (m - 1) * hardware.network_hop
    if kind != "all_reduce":
        return ring
    return 2 * min(ring, (n / m - 1) * hardware.hop + math.ceil(math.log2(m)) * hardware.network_hop)


def _transfer_seconds(kind: str, total: float, route: _Route, hardware: Hardware, limit: float) -> float:
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


# The time of one operation, by its flops, its bytes and its launch.


class Work(NamedTuple):
    """The seconds that one operation takes by each of its limits. The largest decides.

    Attributes:
        products: by the rate of matrix products.
        memory: by the bandwidth of memory.
        launch: by the launch of its kernel.
    """

    products: float
    memory: float
    launch: float

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self)

    @property
    def limit(self) -> str:
        """What bounds the operation: "products", "memory" or "launches"."""
        if self.seconds == self.products:
            return "products"
        return "memory" if self.seconds == self.memory else "launches"


def work_of(node: Node, hardware: Hardware) -> Work:
    """Estimate the seconds of one operation that is no collective, and a kernel of its own."""
    moved = nbytes(*stand_ins_of(node), *stand_ins_of_args(node))
    return Work(_compute_seconds(node, hardware), moved / hardware.memory, hardware.launch)


def _compute_seconds(node: Node, hardware: Hardware) -> float:
    count = flops(node)
    operands = stand_ins_of_args(node)
    compute = count / _rate(node, hardware) if count else 0.0
    if compute and hardware.slow != 1.0 and operands and operands[0].element_size() > 2:
        compute *= hardware.slow
    return compute / hardware.float8 if _packet(node) is aten._scaled_mm else compute


_TILE = (128, 256)  # rows and columns of a result that one processor computes at a time
# the position of the first factor
_PRODUCTS = {
    aten.mm: 0,
    aten._scaled_mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
}


def _rate(node: Node, hardware: Hardware) -> float:
    """Return the floating-point operations per second that an operation reaches by its shape."""
    packet = _packet(node)
    if not hardware.product_flops:
        return hardware.flops
    if packet not in _PRODUCTS:  # fused attention, or a convolution
        return hardware.attention_flops if "attention" in str(packet) else hardware.product_flops
    factors = [a for a in node.args if isinstance(a, Node)][_PRODUCTS[packet] :]
    (*batch, m, k), (*_, n) = [stand_ins_of(a)[0].shape for a in factors[:2]]
    return _product_rate(math.prod(batch), m, k, n, hardware)


def product_seconds(m: int, k: int, n: int, hardware: Hardware) -> float:
    """Return the seconds of a product of `[m, k]` and `[k, n]` in half precision, by its floating-point operations."""
    rate = _product_rate(1, m, k, n, hardware) if hardware.product_flops else hardware.flops
    return 2 * m * k * n / rate


def _product_rate(batch: int, m: int, k: int, n: int, hardware: Hardware) -> float:
    """Return the floating-point operations per second of `batch` products of `[m, k]` and `[k, n]`."""
    return hardware.product_flops * k / (k + hardware.half_depth) * _filled(batch, m, n, hardware.processors)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _filled(batch: int, m: int, n: int, processors: int) -> float:
    """Return the share of the processors' work that belongs to a result `[batch, m, n]`.

    Each processor computes one tile at a time. So the last tiles of a dimension, and the last wave of tiles, may not be
    full.
    """
    rows, columns = _TILE
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors) * processors if processors else tiles
    return batch * m * n / (waves * rows * columns)
