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
    "float32_slowdown": ("products of float32 take", 1, "times as long"),
    "memory_bandwidth": ("memory of a device", _GIGA, "GB/s"),
    "launch_seconds": ("an operation, at least", _MICRO, "us"),
    "link_bandwidth": ("a device's collectives within a host", _GIGA, "GB/s"),
    "network_bandwidth": ("a device's collectives between hosts", _GIGA, "GB/s"),
    "latency_seconds": ("a collective, at least", _MICRO, "us"),
    "hop_seconds": ("each step of its ring", _MICRO, "us"),
    "network_hop_seconds": ("each step between hosts", _MICRO, "us"),
    "host_link_bandwidth": ("copies between a device and its host", _GIGA, "GB/s"),
    "host_memory_bandwidth": ("memory of a host", _GIGA, "GB/s"),
    "ranks": ("devices of a host", 1, ""),
    "product_flops": ("products of half precision, of any size", 1e12, "TFLOP/s"),
    "half_depth": ("half of that by an inner dimension of", 1, ""),
    "processors": ("processors that share a product's tiles", 1, ""),
    "attention_flops": ("fused attention, all pairs counted", 1e12, "TFLOP/s"),
    "float8_speedup": ("products of float8 are", 1, "times as fast as those of half precision"),
}
# constants that are 0 where they were not measured
_OPTIONAL = ("product_flops", "half_depth", "processors", "attention_flops", "float8_speedup")


@dataclass(frozen=True)
class Machine:
    """The speeds that one device, its link and its host reach in practice, not those of a data sheet.

    `dataclasses.replace(machine, host_link_bandwidth=55e9)` sets a speed that you measured.

    Attributes:
        name: the name of the machine.
        flops: floating-point operations a second that a device reaches in training.
        device_bytes: bytes of a device's memory that a step may use.
        memory_bandwidth: bytes a second that a device reads and writes.
        host_link_bandwidth: bytes a second between a device and the host, each way.
        host_memory_bandwidth: bytes a second that all of the host's processors together read and write.
        host_copy_bandwidth: bytes a second of the host's memory that the copies of all devices together read and
            write.
        ranks: how many devices share the host.
        source: where these numbers come from.
        kind: the type of the device in torch: "cuda" or "cpu".
        link_bandwidth: bytes a second that a device sends in an intra-node collective, while it receives as many.
        network_bandwidth: likewise between hosts. Each device has its own port.
        latency_seconds: the least seconds that a collective takes.
        hop_seconds: seconds that each step of a ring within the host adds.
        network_hop_seconds: seconds that each step of a ring between hosts adds.
        launch_seconds: the least seconds that an operation takes.
        float32_slowdown: the time of a product in float32, as a multiple of its time in half precision.
        product_flops: floating-point operations a second that no product of half precision exceeds. With it, the cost
            model rates a product by its shape; with 0 products and attention reach `flops` in any shape.
        half_depth: the inner dimension at which a product reaches half of `product_flops`.
        processors: the number of processors over which the tiles of a product are distributed.
        attention_flops: floating-point operations a second of fused attention, all pairs counted.
        float8_speedup: the speed of a product in float8, as a multiple of its speed in half precision; with 0 it is the
            same.
        axis_bandwidths: bytes a second that a device sends along an axis of the mesh, by the name of the axis. They
            replace `link_bandwidth` and `network_bandwidth`.
        sources: the sources of constants: `(name, value, source)`. A constant whose value was changed since has the
            source "as given".

    Raises:
        ValueError: if a number is not above 0.

    Example:
        >>> import dataclasses
        >>> from fzero import tuning
        >>> print(dataclasses.replace(tuning.A100, name="ours", host_link_bandwidth=25e9, source="measured in March"))
        ours: 140 TFLOP/s, 37.2 GB at 1,300 GB/s, link 25 GB/s each way; host of 8 devices: 300 GB/s, copies 300 GB/s
        (measured in March)
    """

    name: str
    flops: float
    device_bytes: float
    memory_bandwidth: float
    host_link_bandwidth: float
    host_memory_bandwidth: float
    host_copy_bandwidth: float
    ranks: int
    source: str = "as given"
    kind: str = "cuda"
    link_bandwidth: float = 300e9
    network_bandwidth: float = 40e9
    latency_seconds: float = 2e-5
    launch_seconds: float = 4e-6
    float32_slowdown: float = 2.0
    hop_seconds: float = 3.4e-6
    network_hop_seconds: float = 9.6e-6
    product_flops: float = 0.0
    half_depth: float = 0.0
    processors: int = 0
    attention_flops: float = 0.0
    float8_speedup: float = 0.0
    axis_bandwidths: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, float, str], ...] = ()

    def __post_init__(self) -> None:
        """Check that every number is above 0, and make tuples of JSON's lists."""
        for name in ("axis_bandwidths", "sources"):
            object.__setattr__(self, name, tuple([tuple(x) for x in getattr(self, name)]))
        for axis, speed in self.axis_bandwidths:
            if not isinstance(axis, str) or not _is_speed(speed):
                argument_text = f"axis_bandwidths={dict(self.axis_bandwidths)!r}"
                raise ValueError(f"Machine: {argument_text}: expected bytes a second by the name of an axis")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OPTIONAL and value == 0:
                continue
            if field.name not in ("name", "source", "kind", "axis_bandwidths", "sources") and not _is_speed(value):
                raise ValueError(f"Machine: {field.name}={value!r}: expected a number above 0")

    def __str__(self) -> str:
        device, link = _format_gigabytes(self.memory_bandwidth), _format_gigabytes(self.host_link_bandwidth)
        host, copies = _format_gigabytes(self.host_memory_bandwidth), _format_gigabytes(self.host_copy_bandwidth)
        return (
            f"{self.name}: {self.flops / 1e12:,.0f} TFLOP/s, {format_bytes(self.device_bytes)} at {device}, "
            f"link {link} each way; host of {self.ranks} devices: {host}, copies {copies}\n({self.source})"
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
        links = [
            Constant(f"collectives along {x}", f"{n / _GIGA:,.4g} GB/s", "as given") for x, n in self.axis_bandwidths
        ]
        return constants + links

    def as_hardware(self) -> Hardware:
        """Return the machine as a `fzero.graph.Hardware`, for the cost model of plans."""
        return Hardware(
            kind=self.kind,
            flops=self.flops,
            memory_bandwidth=self.memory_bandwidth,
            link_bandwidth=self.link_bandwidth,
            latency_seconds=self.latency_seconds,
            launch_seconds=self.launch_seconds,
            network_bandwidth=self.network_bandwidth,
            ranks_per_machine=self.ranks,
            float32_slowdown=self.float32_slowdown,
            host_memory_bandwidth=self.host_memory_bandwidth / self.ranks,
            host_link_bandwidth=self.host_link_bandwidth,
            hop_seconds=self.hop_seconds,
            network_hop_seconds=self.network_hop_seconds,
            axis_bandwidths=self.axis_bandwidths,
            product_flops=self.product_flops,
            half_depth=self.half_depth,
            processors=self.processors,
            attention_flops=self.attention_flops,
            float8_speedup=self.float8_speedup or 1.0,
        )


def _format_gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / _GIGA:,.0f} GB/s"


def _is_speed(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
