"""Machines: their speeds as the cost model takes them, by name from data sheets or measured on this machine."""

import json
import math
import os
import pathlib
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from fzero.graph import Device, size

__all__ = [
    "A100",
    "CPU",
    "H100",
    "H200",
    "MACHINES",
    "Constant",
    "Machine",
    "cache_folder",
    "calibrated",
    "machine_of",
    "save",
    "written",
]

# A machine as a cost model sees it: speeds of a device, of its links, and of the host that it shares.


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


# Machines by name: those of data sheets, with the shares of them that training reaches, and what was assumed.


NCCL = "NCCL's own model, src/graph/tuning.cc"


def _assumed(name: str, kind: str = "cuda", **constants: tuple[Any, str]) -> Machine:
    """Make a machine of constants, each with its source."""
    values = {constant: value for constant, (value, _) in constants.items()}
    sources = tuple([(constant, value, source) for constant, (value, source) in constants.items()])
    seen = dict.fromkeys([text for constant, (_, text) in constants.items() if constant in SUMMARY])
    return Machine(name, **values, kind=kind, source=f"assumed: {', '.join(seen)}", sources=sources)


SUMMARY = ("flops", "device_bytes", "device_memory", "link", "host_memory")  # the constants of offload

NVIDIA: dict[str, Any] = {  # what does not depend on the card
    "latency": (2e-5, f"8.4 us in {NCCL}, and the start of a kernel on each rank"),
    "hop": (3.4e-6, f"{NCCL}: a ring over NVLink"),
    "far_hop": (9.6e-6, f"{NCCL}: a ring over a network"),
    "launch": (4e-6, "the start of a kernel"),
    "slow": (2.0, "TF32 has half of the rate"),
}
A100 = _assumed(
    "8 x A100 40 GB",
    flops=(140e12, "45% of 312 TFLOP/s"),
    device_bytes=(0.93 * 40e9, "93% of 40 GB"),
    device_memory=(1.3e12, "84% of 1,555 GB/s"),
    link=(22e9, "70% of PCIe 4 x16"),
    host_memory=(300e9, "73% of 2 x 8 channels of DDR4-3200"),
    host_copies=(300e9, "73% of 2 x 8 channels of DDR4-3200"),
    ranks=(8, "a DGX"),
    peers=(230e9, f"98% of the 235 GB/s that are the most in {NCCL}"),
    network=(20e9, "80% of a port of 200 Gb/s for each device"),
    **NVIDIA,
)
H100 = _assumed(
    "8 x H100 80 GB",
    flops=(400e12, "40% of 989 TFLOP/s"),
    device_bytes=(0.93 * 80e9, "93% of 80 GB"),
    device_memory=(2.6e12, "78% of 3,350 GB/s"),
    link=(50e9, "79% of PCIe 5 x16"),
    host_memory=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    host_copies=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    ranks=(8, "a DGX"),
    peers=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network=(40e9, "80% of a port of 400 Gb/s for each device"),
    **NVIDIA,
)
H200 = _assumed(
    "H200 with 16 cores",
    flops=(500e12, "51% of 989 TFLOP/s"),
    device_bytes=(0.93 * 141e9, "93% of 141 GB"),
    device_memory=(4.0e12, "83% of 4,800 GB/s"),
    link=(50e9, "79% of PCIe 5 x16"),
    host_memory=(80e9, "5 GB/s a core"),
    host_copies=(200e9, "40% of 2 x 8 channels of DDR5-4800"),
    ranks=(1, "a device that is rented by itself"),
    peers=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network=(40e9, "80% of a port of 400 Gb/s for each device"),
    **NVIDIA,
)
JIT = "the constants by which fzero.jit compares schedules on a CPU"
CPU = _assumed(
    "two cores, gloo",
    "cpu",
    flops=(5e10, JIT),
    device_bytes=(8e9, JIT),
    device_memory=(1e10, JIT),
    link=(1e10, JIT),
    host_memory=(1e10, JIT),
    host_copies=(1e10, JIT),
    ranks=(2, JIT),
    peers=(1e9, JIT),
    network=(1e9, JIT),
    latency=(1e-4, JIT),
    hop=(1e-4, "a message of gloo"),
    far_hop=(1e-4, "a message of gloo"),
    launch=(2e-6, JIT),
    slow=(1.0, JIT),
)
MACHINES = {"a100": A100, "h100": H100, "h200": H200, "cpu": CPU}


# The user's cache folder: what fzero measured of this machine, and rows that were planned before.


def cache_folder() -> pathlib.Path:
    """Return the folder: `fzero` in `$XDG_CACHE_HOME`, or in `~/.cache`. It need not be there."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fzero"


def written(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all, whoever else writes it. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


# The machine of a name: of a data sheet, or the one that was calibrated.


def machine_of(device: Any) -> Machine:
    """Return the machine of a name, or the one that was given; "calibrated" is the one in the cache folder.

    Raises:
        TypeError: if `device` is neither a name nor a machine.
        ValueError: if no machine has that name, or none was calibrated.
    """
    if isinstance(device, Machine):
        return device
    names = ", ".join([*MACHINES, "calibrated"])
    if not isinstance(device, str):
        raise TypeError(
            f"device={device!r}: expected a fzero.tuning.Machine, or one of {', '.join(MACHINES)}, calibrated"
        )
    if device.lower() == "calibrated":
        return calibrated()
    if device.lower() not in MACHINES:
        raise ValueError(f"device={device!r} is unknown: expected {names}, or a fzero.tuning.Machine of your own")
    return MACHINES[device.lower()]


def _path() -> Any:
    return cache_folder() / "calibrated.json"


def save(machine: Machine) -> Any:
    """Keep a machine in the user's cache folder, and return its path."""
    written(_path(), json.dumps(asdict(machine), indent=1))
    return _path()


def calibrated() -> Machine:
    """Return the machine that `fzero calibrate` stored.

    Raises:
        ValueError: if there is none, or none that can be read.
    """
    try:
        return Machine(**json.loads(_path().read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ValueError(
            "device='calibrated': nothing is stored yet: run `fzero calibrate` on the machine, or "
            "`torchrun --nproc-per-node N -m fzero calibrate` to measure its links too"
        ) from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"device='calibrated': {_path()} cannot be read, run `fzero calibrate` again: {error}"
        ) from error
