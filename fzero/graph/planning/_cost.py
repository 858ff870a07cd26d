"""The time of one operation, by its flops, its bytes and its launch."""

import math
from typing import Any, NamedTuple

from torch.fx import Node

from fzero.graph.ir import argument_stand_ins, aten, flops, nbytes, node_stand_ins
from fzero.graph.planning._hardware import Hardware

__all__ = ["Work", "estimate_work", "product_seconds"]


class Work(NamedTuple):
    """The seconds that one operation takes by each of its limits. The largest decides.

    Attributes:
        product_seconds: by the rate of matrix products.
        memory_seconds: by the bandwidth of memory.
        launch_seconds: by the launch of its kernel.
    """

    product_seconds: float
    memory_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self)

    @property
    def limit(self) -> str:
        """What bounds the operation: "products", "memory" or "launches"."""
        if self.seconds == self.product_seconds:
            return "products"
        return "memory" if self.seconds == self.memory_seconds else "launches"


def estimate_work(node: Node, hardware: Hardware) -> Work:
    """Estimate the seconds of one operation that is not a collective, and a kernel of its own."""
    memory_bytes = nbytes(*node_stand_ins(node), *argument_stand_ins(node))
    return Work(_compute_seconds(node, hardware), memory_bytes / hardware.memory_bandwidth, hardware.launch_seconds)


def _compute_seconds(node: Node, hardware: Hardware) -> float:
    count = flops(node)
    operands = argument_stand_ins(node)
    compute = count / _operation_rate(node, hardware) if count else 0.0
    if compute and hardware.float32_slowdown != 1.0 and operands and operands[0].element_size() > 2:
        compute *= hardware.float32_slowdown
    return compute / hardware.float8_speedup if _overload_packet(node) is aten._scaled_mm else compute


_TILE = (128, 256)  # rows and columns of a result that one processor computes at a time


# the position of the first factor
_PRODUCTS = {
    aten.mm: 0,
    aten._scaled_mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
}


def _operation_rate(node: Node, hardware: Hardware) -> float:
    """Return the floating-point operations per second that an operation reaches by its shape."""
    packet = _overload_packet(node)
    if not hardware.product_flops:
        return hardware.flops
    if packet not in _PRODUCTS:  # fused attention, or a convolution
        return hardware.attention_flops if "attention" in str(packet) else hardware.product_flops
    factors = [a for a in node.args if isinstance(a, Node)][_PRODUCTS[packet] :]
    (*batch, m, k), (*_, n) = [node_stand_ins(a)[0].shape for a in factors[:2]]
    return _product_rate(math.prod(batch), m, k, n, hardware)


def product_seconds(m: int, k: int, n: int, hardware: Hardware) -> float:
    """Return the seconds of a product of `[m, k]` and `[k, n]` in half precision, by its floating-point operations."""
    rate = _product_rate(1, m, k, n, hardware) if hardware.product_flops else hardware.flops
    return 2 * m * k * n / rate


def _product_rate(batch: int, m: int, k: int, n: int, hardware: Hardware) -> float:
    """Return the floating-point operations per second of `batch` products of `[m, k]` and `[k, n]`."""
    return hardware.product_flops * k / (k + hardware.half_depth) * _filled_share(batch, m, n, hardware.processors)


def _overload_packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _filled_share(batch: int, m: int, n: int, processors: int) -> float:
    """Return the share of the processors' work that belongs to a result `[batch, m, n]`.

    Each processor computes one tile at a time. So the last tiles of a dimension, and the last wave of tiles, may not be
    full.
    """
    rows, columns = _TILE
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors) * processors if processors else tiles
    return batch * m * n / (waves * rows * columns)
