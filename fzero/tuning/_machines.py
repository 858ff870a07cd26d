"""Machines as a cost model sees them: speeds of a device, of its link, and of the host that it shares."""

import math
from dataclasses import dataclass, fields
from typing import Any

from fzero.graph.plan._cost import Device
from fzero.graph.plan._text import size

__all__ = ["A100", "CPU", "H100", "H200", "Machine", "machine_of"]


@dataclass(frozen=True)
class Machine:
    """What one device, its link and its host can do: speeds that are reached, not those of a data sheet.

    `dataclasses.replace(machine, link=55e9)` says what you measured.

    Attributes:
        name: of the machine.
        flops: floating-point operations a second that a device reaches in training.
        device_bytes: bytes of a device's memory that a step may take.
        device_memory: bytes a second that a device reads and writes.
        link: bytes a second between a device and the host, each way.
        host_memory: bytes a second that the host's processors read and write, all together.
        host_copies: bytes a second of the host's memory that copies of all devices read and write, all together.
        ranks: devices that share the host.
        source: where these numbers are from.
        kind: of the device, as torch names it.
        peers: bytes a second that a collective moves within the host, each way.
        network: bytes a second of each device that a collective moves between hosts, each way.
        latency: seconds of one message between devices.
        launch: seconds that an operation takes at least.
        slow: how many times as long a product of float32 takes as one of half precision.

    Raises:
        ValueError: if a number is not above 0.

    Example:
        >>> import dataclasses
        >>> from fzero import tuning
        >>> print(dataclasses.replace(tuning.A100, name="ours", link=25e9, source="measured in March"))
        ours: 140 TFLOP/s, 37.2 GB at 1,300 GB/s, link 25 GB/s each way; a host for 8 of 300 GB/s, copies 300 GB/s
        (measured in March)
    """

    name: str
    flops: float
    device_bytes: float
    device_memory: float
    link: float
    host_memory: float
    host_copies: float
    ranks: int
    source: str = "as given"
    kind: str = "cuda"
    peers: float = 300e9
    network: float = 40e9
    latency: float = 2e-5
    launch: float = 4e-6
    slow: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "source", "kind") and not _is_speed(value):
                raise ValueError(f"Machine: {field.name}={value!r}: expected a number above 0")

    def __str__(self) -> str:
        speeds = [f"{x / 1e9:,.0f} GB/s" for x in (self.device_memory, self.link, self.host_memory, self.host_copies)]
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} TFLOP/s, {size(self.device_bytes)} at {speeds[0]}, "
            f"link {speeds[1]} each way; a host for {self.ranks} of {speeds[2]}, copies {speeds[3]}\n({self.source})"
        )

    def links(self) -> str:
        """Say what collectives are taken to reach, and operations to take at least."""
        return (
            f"collectives {self.peers / 1e9:,.3g} GB/s within a host, {self.network / 1e9:,.3g} GB/s a device between "
            f"hosts, {self.latency * 1e6:,.3g} us a message; an operation takes at least {self.launch * 1e6:,.3g} us; "
            f"float32 products take {self.slow:g} times as long as half precision's"
        )

    def as_device(self) -> Device:
        """Return what the cost model of plans takes."""
        return Device(
            self.kind,
            self.flops,
            self.device_memory,
            self.peers,
            self.latency,
            self.launch,
            self.network,
            self.ranks,
            slow=self.slow,
            host=self.host_memory / self.ranks,
            host_link=self.link,
        )


def machine_of(device: Any) -> Machine:
    """Return the machine of a name, or the one that was given.

    Raises:
        TypeError: if `device` is neither a name nor a machine.
        ValueError: if no machine has that name.
    """
    if isinstance(device, Machine):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device={device!r}: expected a fzero.tuning.Machine, or one of {', '.join(MACHINES)}")
    if device.lower() not in MACHINES:
        raise ValueError(
            f"device={device!r} is unknown: expected {', '.join(MACHINES)}, or a fzero.tuning.Machine of your own"
        )
    return MACHINES[device.lower()]


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


A100 = Machine(
    "8 x A100 40 GB",
    flops=140e12,
    device_bytes=0.93 * 40e9,
    device_memory=1.3e12,
    link=22e9,
    host_memory=300e9,
    host_copies=300e9,
    ranks=8,
    peers=230e9,
    network=20e9,
    source="assumed: 45% of 312 TFLOP/s, 93% of 40 GB, 84% of 1,555 GB/s, 70% of PCIe 4 x16, "
    "73% of 2 x 8 channels of DDR4-3200",
)
H100 = Machine(
    "8 x H100 80 GB",
    flops=400e12,
    device_bytes=0.93 * 80e9,
    device_memory=2.6e12,
    link=50e9,
    host_memory=480e9,
    host_copies=480e9,
    ranks=8,
    source="assumed: 40% of 989 TFLOP/s, 93% of 80 GB, 78% of 3,350 GB/s, 79% of PCIe 5 x16, "
    "78% of 2 x 8 channels of DDR5-4800",
)
H200 = Machine(
    "H200 with 16 cores",
    flops=500e12,
    device_bytes=0.93 * 141e9,
    device_memory=4.0e12,
    link=50e9,
    host_memory=80e9,
    host_copies=200e9,
    ranks=1,
    source="assumed: 51% of 989 TFLOP/s, 93% of 141 GB, 83% of 4,800 GB/s, 79% of PCIe 5 x16, 5 GB/s a core",
)
CPU = Machine(
    "two cores, gloo",
    flops=5e10,
    device_bytes=8e9,
    device_memory=1e10,
    link=1e10,
    host_memory=1e10,
    host_copies=1e10,
    ranks=2,
    kind="cpu",
    peers=1e9,
    network=1e9,
    latency=1e-4,
    launch=2e-6,
    slow=1.0,
    source="assumed: the constants by which fzero.jit compares schedules on a CPU",
)
MACHINES = {"a100": A100, "h100": H100, "h200": H200, "cpu": CPU}
