"""The rates and latencies of the hardware that the cost model reads."""

import math
from typing import NamedTuple

__all__ = ["HARDWARE", "Hardware"]


class Hardware(NamedTuple):
    """The hardware of a rank: the speeds of its device, of its host, and of the links of its mesh.

    Attributes:
        kind: torch's name of the device type: "cpu" or "cuda".
        flops: floating-point operations per second.
        memory_bandwidth: bytes per second that the device reads or writes in its memory.
        link_bandwidth: bytes per second that a rank sends, and at the same time receives, within its machine.
        latency_seconds: minimum seconds of a collective.
        launch_seconds: minimum seconds of an operation.
        network_bandwidth: bytes per second that a rank sends to other machines; each rank has its own network link.
        ranks_per_machine: the number of ranks on a machine. Their numbers are consecutive, so the mesh's last axis
            changes fastest.
        axes: the axes of the mesh with their sizes, as far as they are known.
        float32_slowdown: the factor by which a matrix product takes longer if its operands are wider than half
            precision.
        host_memory_bandwidth: bytes per second that the host reads or writes for this rank; 0 if the host's work is not
            counted or is this device's.
        host_link_bandwidth: bytes per second between the device and the host.
        hop_seconds: seconds that each step of a ring within a machine adds; counted only if `axes` are known.
        network_hop_seconds: seconds that each step of a ring between machines adds; counted only if `axes` are known.
        axis_bandwidths: bytes per second along an axis, by the axis's name; they replace `link_bandwidth` and
            `network_bandwidth`.
        group_axes: the axes of each process group, by the group's name.
        product_flops: floating-point operations per second that no product of half precision exceeds; with 0, products
            and attention reach `flops` in any shape.
        half_depth: the inner dimension at which a product reaches half of `product_flops`.
        processors: the number of processors over which the tiles of a product are distributed; with 0 any shape fills
            them.
        attention_flops: floating-point operations per second of fused attention, all pairs counted.
        float8_speedup: the factor by which a product of float8 is faster than one of half precision.
        fuses: whether a compiler fuses elementwise operations: values between them are neither stored nor read, and
            each kernel is launched once. The compiler is that of the step, whose plan marks these values.
    """

    kind: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    latency_seconds: float
    launch_seconds: float
    network_bandwidth: float = math.inf
    ranks_per_machine: float = math.inf
    axes: tuple[tuple[str, int], ...] = ()
    float32_slowdown: float = 1.0
    host_memory_bandwidth: float = 0.0
    host_link_bandwidth: float = 0.0
    hop_seconds: float = 0.0
    network_hop_seconds: float = 0.0
    axis_bandwidths: tuple[tuple[str, float], ...] = ()
    group_axes: tuple[tuple[str, str], ...] = ()
    product_flops: float = 0.0
    half_depth: float = 0.0
    processors: int = 0
    attention_flops: float = 0.0
    float8_speedup: float = 1.0
    fuses: bool = False


HARDWARE = {
    "cpu": Hardware(
        "cpu", flops=5e10, memory_bandwidth=1e10, link_bandwidth=1e9, latency_seconds=1e-4, launch_seconds=2e-6
    ),  # one or two cores, gloo
    # a data-centre GPU with NVLink and PCIe 5; eight GPUs share a host
    "cuda": Hardware(
        "cuda",
        flops=4e14,
        memory_bandwidth=3e12,
        link_bandwidth=1e11,
        latency_seconds=2e-5,
        launch_seconds=4e-6,
        host_memory_bandwidth=6e10,
        host_link_bandwidth=5e10,
    ),
}
