"""What a device can do, in the numbers that the cost model takes."""

import math
from typing import NamedTuple

__all__ = ["DEVICES", "Device"]


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
