"""Machines by name: those of data sheets, and the one that `fzero calibrate` stored.

The speeds are shares of those in data sheets, as training reaches them; the rest is assumed.
"""

import json
from dataclasses import asdict
from typing import Any

from fzero._arguments import did_you_mean
from fzero.tuning.machines._cache_folder import cache_folder, write_atomically
from fzero.tuning.machines._machine import Machine

__all__ = ["A100", "A100_80GB", "CPU", "H100", "H200", "MACHINES", "find_machine", "save"]


_NCCL = "NCCL's own model, src/graph/tuning.cc"


def _make_machine(name: str, kind: str = "cuda", **constants: tuple[Any, str]) -> Machine:
    """Make a machine from constants, each with its source."""
    values = {constant: value for constant, (value, _) in constants.items()}
    sources = tuple([(constant, value, source) for constant, (value, source) in constants.items()])
    texts = dict.fromkeys([constants[constant][1] for constant in _SUMMARY])
    return Machine(name, **values, kind=kind, source=f"assumed: {', '.join(texts)}", sources=sources)


# the constants that offload depends on
_SUMMARY = ("flops", "device_bytes", "memory_bandwidth", "host_link_bandwidth", "host_memory_bandwidth")

_NVIDIA: dict[str, Any] = {  # constants that do not depend on the card
    "latency_seconds": (2e-5, f"8.4 us in {_NCCL}, and the launch of a kernel on each rank"),
    "hop_seconds": (3.4e-6, f"{_NCCL}: a ring over NVLink"),
    "network_hop_seconds": (9.6e-6, f"{_NCCL}: a ring over a network"),
    "launch_seconds": (4e-6, "the launch of a kernel"),
    "float32_slowdown": (2.0, "TF32 has half the rate"),
}
_FITTED = "fitted to half of the published runs: benchmarks/published.md"
_AMPERE: dict[str, Any] = {  # constants of both A100
    "flops": (140e12, "45% of 312 TFLOP/s"),
    "host_link_bandwidth": (22e9, "70% of PCIe 4 x16"),
    "host_memory_bandwidth": (300e9, "73% of 2 x 8 channels of DDR4-3200"),
    "host_copy_bandwidth": (300e9, "73% of 2 x 8 channels of DDR4-3200"),
    "ranks": (8, "a DGX"),
    "link_bandwidth": (230e9, f"98% of 235 GB/s, the most in {_NCCL}"),
    "network_bandwidth": (20e9, "80% of a port of 200 Gb/s for each device"),
    "processors": (108, "the data sheet"),
    **_NVIDIA,
}
A100 = _make_machine(
    "8 x A100 40 GB",
    device_bytes=(0.93 * 40e9, "93% of 40 GB"),
    memory_bandwidth=(1.3e12, "84% of 1,555 GB/s"),
    product_flops=(217e12, _FITTED),
    attention_flops=(194e12, _FITTED),
    **_AMPERE,
)
A100_80GB = _make_machine(
    "8 x A100 80 GB",
    device_bytes=(0.93 * 80e9, "93% of 80 GB"),
    memory_bandwidth=(1.71e12, "84% of 2,039 GB/s"),
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
    float8_speedup=(2.0, "the data sheet, 1,979 of 989 TFLOP/s; measured by nobody here"),
    device_bytes=(0.93 * 80e9, "93% of 80 GB"),
    memory_bandwidth=(2.6e12, "78% of 3,350 GB/s"),
    host_link_bandwidth=(50e9, "79% of PCIe 5 x16"),
    host_memory_bandwidth=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    host_copy_bandwidth=(480e9, "78% of 2 x 8 channels of DDR5-4800"),
    ranks=(8, "a DGX"),
    link_bandwidth=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network_bandwidth=(40e9, "80% of a port of 400 Gb/s for each device"),
    **_NVIDIA,
)
H200 = _make_machine(
    "H200 with 16 cores",
    product_flops=(591e12, "as the H100's"),
    half_depth=(438.0, "as the H100's"),
    processors=(132, "the data sheet"),
    attention_flops=(378e12, "as the H100's"),
    float8_speedup=(2.0, "as the H100's"),
    flops=(500e12, "51% of 989 TFLOP/s"),
    device_bytes=(0.93 * 141e9, "93% of 141 GB"),
    memory_bandwidth=(4.0e12, "83% of 4,800 GB/s"),
    host_link_bandwidth=(50e9, "79% of PCIe 5 x16"),
    host_memory_bandwidth=(80e9, "5 GB/s a core"),
    host_copy_bandwidth=(200e9, "40% of 2 x 8 channels of DDR5-4800"),
    ranks=(1, "a single rented device"),
    link_bandwidth=(300e9, "67% of NVLink 4's 450 GB/s each way"),
    network_bandwidth=(40e9, "80% of a port of 400 Gb/s for each device"),
    **_NVIDIA,
)
_JIT = "a constant with which fzero.jit compares schedules on a CPU"
CPU = _make_machine(
    "two cores, gloo",
    "cpu",
    flops=(5e10, _JIT),
    device_bytes=(8e9, _JIT),
    memory_bandwidth=(1e10, _JIT),
    host_link_bandwidth=(1e10, _JIT),
    host_memory_bandwidth=(1e10, _JIT),
    host_copy_bandwidth=(1e10, _JIT),
    ranks=(2, _JIT),
    link_bandwidth=(1e9, _JIT),
    network_bandwidth=(1e9, _JIT),
    latency_seconds=(1e-4, _JIT),
    hop_seconds=(1e-4, "a message of gloo"),
    network_hop_seconds=(1e-4, "a message of gloo"),
    launch_seconds=(2e-6, _JIT),
    float32_slowdown=(1.0, _JIT),
)
MACHINES = {"a100": A100, "a100-80gb": A100_80GB, "h100": H100, "h200": H200, "cpu": CPU}


def find_machine(machine: Any) -> Machine:
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
        hint = did_you_mean(machine, MACHINES)
        raise ValueError(f"machine={machine!r} is unknown: expected one of {names}, or a fzero.tuning.Machine{hint}")
    return MACHINES[machine.lower()]


def _calibrated_path() -> Any:
    return cache_folder() / "calibrated.json"


def save(machine: Machine) -> Any:
    """Store a machine in the user's cache folder, and return the path."""
    write_atomically(_calibrated_path(), json.dumps(asdict(machine), indent=1))
    return _calibrated_path()


def _read_calibrated() -> Machine:
    """Return the machine that `fzero calibrate` stored.

    Raises:
        ValueError: if no machine is stored, or the file cannot be read.
    """
    try:
        return Machine(**json.loads(_calibrated_path().read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ValueError(
            "machine='calibrated': no machine is stored yet: run `fzero calibrate` on the machine, or "
            "`torchrun --nproc-per-node N -m fzero calibrate` to measure its links too"
        ) from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"machine='calibrated': {_calibrated_path()} cannot be read: {error}. Run `fzero calibrate` again"
        ) from error
