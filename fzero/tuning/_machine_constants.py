"""Machines by name: those of data sheets, with the shares of them that training reaches, and what was assumed."""

from typing import Any

from fzero.tuning._machines import Machine

__all__ = ["A100", "CPU", "H100", "H200", "MACHINES"]

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
