"""Machines: the speeds that the cost model uses, from data sheets or measured on this machine."""

import json
import math
import os
import pathlib
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from fzero._format import format_bytes
from fzero.graph import Hardware

__all__ = [
    "A100",
    "A100_80GB",
    "CPU",
    "H100",
    "H200",
    "MACHINES",
    "Constant",
    "Machine",
    "cache_folder",
    "machine_of",
    "save",
    "write_atomically",
]

# A machine, for the cost model: the speeds of a device, of its links, and of the host that devices share.


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


# Machines by name. Their speeds are shares of those in data sheets, as training reaches them; the rest is assumed.


_NCCL = "NCCL's own model, src/graph/tuning.cc"


def _make_machine(name: str, kind: str = "cuda", **constants: tuple[Any, str]) -> Machine:
    """Make a machine from constants, each with its source."""
    values = {constant: value for constant, (value, _) in constants.items()}
    sources = tuple([(constant, value, source) for constant, (value, source) in constants.items()])
    texts = dict.fromkeys([constants[constant][1] for constant in _SUMMARY])
    return Machine(name, **values, kind=kind, source=f"assumed: {', '.join(texts)}", sources=sources)


_SUMMARY = ("flops", "device_bytes", "device_memory", "link", "host_memory")  # the constants that offload depends on

_NVIDIA: dict[str, Any] = {  # constants that do not depend on the card
    "latency": (2e-5, f"8.4 us in {_NCCL}, and the launch of a kernel on each rank"),
    "hop": (3.4e-6, f"{_NCCL}: a ring over NVLink"),
    "network_hop": (9.6e-6, f"{_NCCL}: a ring over a network"),
    "launch": (4e-6, "the launch of a kernel"),
    "slow": (2.0, "TF32 has half the rate"),
}
_FITTED = "fitted to half of the published runs: benchmarks/published.md"
_AMPERE: dict[str, Any] = {  # constants of both A100
    "flops": (140e12, "45% of 312 TFLOP/s"),
    "link": (22e9, "70% of PCIe 4 x16"),
    "host_memory": (300e9, "73% of 2 x 8 channels of DDR4-3200"),
    "host_copies": (300e9, "73% of 2 x 8 channels of DDR4-3200"),
    "ranks": (8, "a DGX"),
    "peers": (230e9, f"98% of 235 GB/s, the most in {_NCCL}"),
    "network": (20e9, "80% of a port of 200 Gb/s for each device"),
    "processors": (108, "the data sheet"),
    **_NVIDIA,
}
A100 = _make_machine(
    "8 x A100 40 GB",
    device_bytes=(0.93 * 40e9, "93% of 40 GB"),
    device_memory=(1.3e12, "84% of 1,555 GB/s"),
    product_flops=(217e12, _FITTED),
    attention_flops=(194e12, _FITTED),
    **_AMPERE,
)
A100_80GB = _make_machine(
    "8 x A100 80 GB",
    device_bytes=(0.93 * 80e9, "93% of 80 GB"),
    device_memory=(1.71e12, "84% of 2,039 GB/s"),
    product_flops=(236e12, _FITTED),
    attention_flops=(202e12, _FITTED),
    **_AMPERE,
)
H100 = _make_machine(
    "8 x H100 80 GB",
    product_flops=(591e12, _FITTED),
    half_depth=(438.0, _FITTED),
    processors=(132, "the data sheet"),
    attention_flops=(378e12, _FITTED),
    flops=(400e12, "40% of 989 TFLOP/s"),
    float8=(2.0, "the data sheet, 1,979 of 989 TFLOP/s; measured by nobody here"),
    device_bytes=(0.93 * 80e9, "93% of 80 GB"),
    device_memory=(2.6e12, "78% of 3,350 GB/s"),
    link=(50e9, "79% of PCIe 5 x16"),
    host_memory=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    host_copies=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    ranks=(8, "a DGX"),
    peers=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network=(40e9, "80% of a port of 400 Gb/s for each device"),
    **_NVIDIA,
)
H200 = _make_machine(
    "H200 with 16 cores",
    product_flops=(591e12, "as the H100's"),
    half_depth=(438.0, "as the H100's"),
    processors=(132, "the data sheet"),
    attention_flops=(378e12, "as the H100's"),
    float8=(2.0, "as the H100's"),
    flops=(500e12, "51% of 989 TFLOP/s"),
    device_bytes=(0.93 * 141e9, "93% of 141 GB"),
    device_memory=(4.0e12, "83% of 4,800 GB/s"),
    link=(50e9, "79% of PCIe 5 x16"),
    host_memory=(80e9, "5 GB/s a core"),
    host_copies=(200e9, "40% of 2 x 8 channels of DDR5-4800"),
    ranks=(1, "a single rented device"),
    peers=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network=(40e9, "80% of a port of 400 Gb/s for each device"),
    **_NVIDIA,
)
_JIT = "a constant with which fzero.jit compares schedules on a CPU"
CPU = _make_machine(
    "two cores, gloo",
    "cpu",
    flops=(5e10, _JIT),
    device_bytes=(8e9, _JIT),
    device_memory=(1e10, _JIT),
    link=(1e10, _JIT),
    host_memory=(1e10, _JIT),
    host_copies=(1e10, _JIT),
    ranks=(2, _JIT),
    peers=(1e9, _JIT),
    network=(1e9, _JIT),
    latency=(1e-4, _JIT),
    hop=(1e-4, "a message of gloo"),
    network_hop=(1e-4, "a message of gloo"),
    launch=(2e-6, _JIT),
    slow=(1.0, _JIT),
)
MACHINES = {"a100": A100, "a100-80gb": A100_80GB, "h100": H100, "h200": H200, "cpu": CPU}


# The user's cache folder: the calibrated machine, and rows that were planned before.


def cache_folder() -> pathlib.Path:
    """Return the path of the cache folder: `fzero` in `$XDG_CACHE_HOME` or `~/.cache`. The folder may not exist yet."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fzero"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write a file atomically, also while other processes write it. Create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


# A machine by its name: one from a data sheet, or the calibrated one.


def machine_of(machine: Any) -> Machine:
    """Return the machine of a name. A `Machine` is returned as it is; "calibrated" is the one in the cache folder.

    Raises:
        TypeError: if `machine` is neither a name nor a machine.
        ValueError: if no machine has that name, or if "calibrated" was never stored.
    """
    if isinstance(machine, Machine):
        return machine
    names = ", ".join([*MACHINES, "calibrated"])
    if not isinstance(machine, str):
        raise TypeError(
            f"machine={machine!r}: expected a fzero.tuning.Machine, or one of {', '.join(MACHINES)}, calibrated"
        )
    if machine.lower() == "calibrated":
        return _read_calibrated()
    if machine.lower() not in MACHINES:
        raise ValueError(f"machine={machine!r} is unknown: expected one of {names}, or a fzero.tuning.Machine")
    return MACHINES[machine.lower()]


def _path() -> Any:
    return cache_folder() / "calibrated.json"


def save(machine: Machine) -> Any:
    """Store a machine in the user's cache folder, and return the path."""
    write_atomically(_path(), json.dumps(asdict(machine), indent=1))
    return _path()


def _read_calibrated() -> Machine:
    """Return the machine that `fzero calibrate` stored.

    Raises:
        ValueError: if no machine is stored, or the file cannot be read.
    """
    try:
        return Machine(**json.loads(_path().read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ValueError(
            "machine='calibrated': no machine is stored yet: run `fzero calibrate` on the machine, or "
            "`torchrun --nproc-per-node N -m fzero calibrate` to measure its links too"
        ) from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"machine='calibrated': {_path()} cannot be read: {error}. Run `fzero calibrate` again"
        ) from error
