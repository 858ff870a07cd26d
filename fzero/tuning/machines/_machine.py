"""A machine, for the cost model: the speeds of a device, of its links, and of the host that devices share."""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fzero._format import format_bytes
from fzero.graph import Hardware

__all__ = ["Constant", "Machine"]


class Constant(NamedTuple):
    """A constant of the cost model, as text.

    Attributes:
        name: the quantity that the constant measures.
        value: the value with its unit.
        source: where the value comes from.
    """

    name: str
    value: str
    source: str


_GIGA, _MICRO = 1e9, 1e-6
_CONSTANTS = {  # by attribute of `Machine`: a label, the size of the unit, and its name
    "flops": ("products of half precision", 1e12, "TFLOP/s"),
    "slow": ("products of float32 take", 1, "times as long"),
    "device_memory": ("memory of a device", _GIGA, "GB/s"),
    "launch": ("an operation, at least", _MICRO, "us"),
    "peers": ("a device's collectives within a host", _GIGA, "GB/s"),
    "network": ("a device's collectives between hosts", _GIGA, "GB/s"),
    "latency": ("a collective, at least", _MICRO, "us"),
    "hop": ("each step of its ring", _MICRO, "us"),
    "network_hop": ("each step between hosts", _MICRO, "us"),
    "link": ("copies between a device and its host", _GIGA, "GB/s"),
    "host_memory": ("memory of a host", _GIGA, "GB/s"),
    "ranks": ("devices of a host", 1, ""),
    "product_flops": ("products of half precision, of any size", 1e12, "TFLOP/s"),
    "half_depth": ("half of that by an inner dimension of", 1, ""),
    "processors": ("processors that share a product's tiles", 1, ""),
    "attention_flops": ("fused attention, all pairs counted", 1e12, "TFLOP/s"),
    "float8": ("products of float8 are", 1, "times as fast as those of half precision"),
}
_OPTIONAL = ("product_flops", "half_depth", "processors", "attention_flops", "float8")  # 0 where they were not measured


@dataclass(frozen=True)
class Machine:
    """The speeds that one device, its link and its host reach in practice, not those of a data sheet.

    `dataclasses.replace(machine, link=55e9)` sets a speed that you measured.

    Attributes:
        name: the name of the machine.
        flops: floating-point operations a second that a device reaches in training.
        device_bytes: bytes of a device's memory that a step may use.
        device_memory: bytes a second that a device reads and writes.
        link: bytes a second between a device and the host, each way.
        host_memory: bytes a second that all of the host's processors together read and write.
        host_copies: bytes a second of the host's memory that the copies of all devices together read and write.
        ranks: how many devices share the host.
        source: where these numbers come from.
        kind: the type of the device in torch: "cuda" or "cpu".
        peers: bytes a second that a device sends in an intra-node collective, while it receives as many.
        network: likewise between hosts. Each device has its own port.
        latency: the least seconds that a collective takes.
        hop: seconds that each step of a ring within the host adds.
        network_hop: seconds that each step of a ring between hosts adds.
        launch: the least seconds that an operation takes.
        slow: the time of a product in float32, as a multiple of its time in half precision.
        product_flops: floating-point operations a second that no product of half precision exceeds. With it, the cost
            model rates a product by its shape; with 0 products and attention reach `flops` in any shape.
        half_depth: the inner dimension at which a product reaches half of `product_flops`.
        processors: the number of processors over which the tiles of a product are distributed.
        attention_flops: floating-point operations a second of fused attention, all pairs counted.
        float8: the speed of a product in float8, as a multiple of its speed in half precision; with 0 it is the same.
        links: bytes a second that a device sends along an axis of the mesh, by the name of the axis. They replace
            `peers` and `network`.
        sources: the sources of constants: `(name, value, source)`. A constant whose value was changed since has the
            source "as given".

    Raises:
        ValueError: if a number is not above 0.

    Example:
        >>> import dataclasses
        >>> from fzero import tuning
        >>> print(dataclasses.replace(tuning.A100, name="ours", link=25e9, source="measured in March"))
        ours: 140 TFLOP/s, 37.2 GB at 1,300 GB/s, link 25 GB/s each way; host of 8 devices: 300 GB/s, copies 300 GB/s
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
    network_hop: float = 9.6e-6
    product_flops: float = 0.0
    half_depth: float = 0.0
    processors: int = 0
    attention_flops: float = 0.0
    float8: float = 0.0
    links: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, float, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("links", "sources"):  # JSON turned these tuples into lists
            object.__setattr__(self, name, tuple([tuple(x) for x in getattr(self, name)]))
        for axis, speed in self.links:
            if not isinstance(axis, str) or not _is_speed(speed):
                raise ValueError(f"Machine: links={dict(self.links)!r}: expected bytes a second by the name of an axis")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OPTIONAL and value == 0:
                continue
            if field.name not in ("name", "source", "kind", "links", "sources") and not _is_speed(value):
                raise ValueError(f"Machine: {field.name}={value!r}: expected a number above 0")

    def __str__(self) -> str:
        speeds = [f"{x / 1e9:,.0f} GB/s" for x in (self.device_memory, self.link, self.host_memory, self.host_copies)]
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} TFLOP/s, {format_bytes(self.device_bytes)} at {speeds[0]}, "
            f"link {speeds[1]} each way; "
            f"host of {self.ranks} devices: {speeds[2]}, copies {speeds[3]}\n({self.source})"
        )

    def constants(self) -> list[Constant]:
        """List the constants of the cost model, each with its source."""
        sources = {(name, value): source for name, value, source in self.sources}
        constants = []
        for name, (label, unit, unit_name) in _CONSTANTS.items():
            value = getattr(self, name)
            if name in _OPTIONAL and value == 0:
                continue
            text = f"{value / unit:,.4g} {unit_name}".strip()
            constants.append(Constant(label, text, sources.get((name, value), "as given")))
        links = [Constant(f"collectives along {x}", f"{n / _GIGA:,.4g} GB/s", "as given") for x, n in self.links]
        return constants + links

    def as_hardware(self) -> Hardware:
        """Return the machine as a `fzero.graph.Hardware`, for the cost model of plans."""
        return Hardware(
            kind=self.kind,
            flops=self.flops,
            memory=self.device_memory,
            link=self.peers,
            latency=self.latency,
            launch=self.launch,
            network=self.network,
            ranks_per_machine=self.ranks,
            slow=self.slow,
            host=self.host_memory / self.ranks,
            host_link=self.link,
            hop=self.hop,
            network_hop=self.network_hop,
            links=self.links,
            product_flops=self.product_flops,
            half_depth=self.half_depth,
            processors=self.processors,
            attention_flops=self.attention_flops,
            float8=self.float8 or 1.0,
        )


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
