"""A machine as a cost model sees it: speeds of a device, of its links, and of the host that it shares."""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fzero.graph.plan._cost import Device
from fzero.graph.plan._text import size

__all__ = ["Constant", "Machine"]


class Constant(NamedTuple):
    """A constant of the cost model, in words.

    Attributes:
        name: what it is of.
        value: with its unit.
        source: where it is from.
    """

    name: str
    value: str
    source: str


GIGA, MICRO = 1e9, 1e-6
CONSTANTS = {  # of a machine, in words, and the unit that suits each
    "flops": ("products of half precision", 1e12, "TFLOP/s"),
    "slow": ("those of float32 take", 1, "times as long"),
    "device_memory": ("memory of a device", GIGA, "GB/s"),
    "launch": ("an operation, at least", MICRO, "us"),
    "peers": ("a device's collectives within a host", GIGA, "GB/s"),
    "network": ("a device's collectives between hosts", GIGA, "GB/s"),
    "latency": ("a collective, at least", MICRO, "us"),
    "hop": ("each step of its ring", MICRO, "us"),
    "far_hop": ("each step between hosts", MICRO, "us"),
    "link": ("copies between a device and its host", GIGA, "GB/s"),
    "host_memory": ("memory of a host", GIGA, "GB/s"),
    "ranks": ("devices of a host", 1, ""),
}


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
        peers: bytes a second that a device sends in a collective within the host, and receives meanwhile.
        network: likewise between hosts, for each device: it has a way out of its own.
        latency: seconds that a collective takes at least.
        hop: seconds that each step of a ring within the host adds.
        far_hop: likewise from host to host.
        launch: seconds that an operation takes at least.
        slow: how many times as long a product of float32 takes as one of half precision.
        links: bytes a second that a device sends along an axis of the mesh, by the axis's name, in place of `peers` and
            `network`.
        sources: of constants, `(name, value, source)`; of one that has another value now it is "as given".

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
    hop: float = 3.4e-6
    far_hop: float = 9.6e-6
    links: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, float, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("links", "sources"):  # which JSON has as lists
            object.__setattr__(self, name, tuple([tuple(x) for x in getattr(self, name)]))
        for axis, speed in self.links:
            if not isinstance(axis, str) or not _is_speed(speed):
                raise ValueError(f"Machine: links={dict(self.links)!r}: expected bytes a second by the name of an axis")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "source", "kind", "links", "sources") and not _is_speed(value):
                raise ValueError(f"Machine: {field.name}={value!r}: expected a number above 0")

    def __str__(self) -> str:
        speeds = [f"{x / 1e9:,.0f} GB/s" for x in (self.device_memory, self.link, self.host_memory, self.host_copies)]
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} TFLOP/s, {size(self.device_bytes)} at {speeds[0]}, "
            f"link {speeds[1]} each way; a host for {self.ranks} of {speeds[2]}, copies {speeds[3]}\n({self.source})"
        )

    def constants(self) -> list[Constant]:
        """List what the cost model computes with, each with its source."""
        known = {(name, value): source for name, value, source in self.sources}
        found = []
        for name, (words, unit, unit_name) in CONSTANTS.items():
            value = getattr(self, name)
            shown = f"{value / unit:,.4g} {unit_name}".strip()
            found.append(Constant(words, shown, known.get((name, value), "as given")))
        given = [Constant(f"collectives along {x}", f"{n / GIGA:,.4g} GB/s", "as given") for x, n in self.links]
        return found + given

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
            hop=self.hop,
            far_hop=self.far_hop,
            links=self.links,
        )


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
