"""calibrate: measure the speeds of this machine in a few seconds, for the cost model."""

import os
import platform
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero._torch import is_accelerator, local_accelerator
from fzero._tracebacks import api_boundary
from fzero.ranks import mesh
from fzero.tuning.machines._machine import Machine
from fzero.tuning.machines._named_machines import CPU, H100
from fzero.tuning.machines._stopwatches import (
    bytes_to_host,
    copy_speed,
    gather_seconds,
    measure_message_seconds,
    product_speed,
    small_seconds,
)

__all__ = ["calibrate"]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_USABLE_SHARE = 0.93  # the share of a device's memory that a step may use, as in the machines by name
_TIMED_ROUNDS = 20  # how often each message is timed


class _Links(NamedTuple):
    """The constants of the links between ranks.

    Attributes:
        bandwidth: bytes a second.
        latency_seconds: seconds of a collective, without the steps of its ring.
        hop_seconds: seconds of one step of the ring.
        ranks: how many ranks were measured.
    """

    bandwidth: float
    latency_seconds: float
    hop_seconds: float
    ranks: int


@api_boundary
def calibrate(seconds: float = 5.0) -> Machine:
    """Measure the speeds of this machine: products, copies and small operations, and links between ranks.

    A single process measures one device. Under torchrun all ranks measure at once, as in training. They also measure
    the links within a machine, and between machines if there are several. Constants that were not measured are
    assumed, and marked so.

    Args:
        seconds: about how many seconds to take.

    Returns:
        A `Machine`; `print(machine.constants())` lists each constant with its source. The command `fzero calibrate`
        stores the machine in the user's cache folder, and `machine="calibrated"` reads it from there.

    Raises:
        ValueError: if `seconds` is not a number above 0.

    Example:
        >>> from fzero import tuning
        >>> machine = tuning.calibrate(0.1)
        >>> machine.kind, machine.flops > 1e8, machine.launch_seconds < 1e-2
        ('cpu', True, True)
        >>> machine.constants()[2].source
        'measured: a copy'
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: expected a number above 0")
    ranks = mesh(dp=-1) if _is_launched() else None
    device = local_accelerator() or torch.device("cpu")
    devices = max(torch.accelerator.device_count(), 1)
    local_ranks = devices if ranks is None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    measure_seconds = seconds / 8
    speeds = {dtype: _slowest_rank_speed(product_speed(dtype, device, measure_seconds)) for dtype in _DTYPES}
    small_call_seconds = {
        dtype: -_slowest_rank_speed(-small_seconds(dtype, device, measure_seconds / 2)) for dtype in _DTYPES
    }
    float32, bfloat16, float16 = (speeds[dtype] for dtype in _DTYPES)
    constants = {
        "flops": (bfloat16, f"measured: bfloat16; float16 reaches {float16 / bfloat16:.2g} times as much"),
        "float32_slowdown": (bfloat16 / float32, f"measured: {float32 / 1e12:,.3g} TFLOP/s of float32"),
        "memory_bandwidth": (copy := _slowest_rank_speed(copy_speed(device, measure_seconds)), "measured: a copy"),
        "launch_seconds": (max(small_call_seconds.values()), "measured: a sum of 16 elements, in the slowest dtype"),
        "ranks": (local_ranks, "devices of this process" if ranks is None else "processes of this machine"),
    }
    constants |= _measure_host(device, copy, local_ranks, measure_seconds)
    if ranks is not None and ranks.size > 1:
        constants |= _measure_links(device, local_ranks, ranks.size)
    return _make_machine(device, constants)


def _is_launched() -> bool:
    return dist.is_available() and (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) > 1)


def _slowest_rank_speed(speed: float) -> float:
    """Return the smallest value of all ranks, so that all ranks agree."""
    if not (dist.is_available() and dist.is_initialized()):
        return speed
    speeds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(speeds, speed)
    return min(speeds)


def _measure_host(
    device: torch.device, copy: float, local_ranks: int, measure_seconds: float
) -> dict[str, tuple[float, str]]:
    """Measure the host's memory, and the copies between host and device."""
    if device.type == "cpu":
        link = (copy, "measured: a copy within host memory")
        host = (copy * local_ranks, "measured: a copy, by all ranks of this machine")
        return {"host_link_bandwidth": link, "host_memory_bandwidth": host}
    share = _slowest_rank_speed(copy_speed(torch.device("cpu"), measure_seconds)) * local_ranks
    link = _slowest_rank_speed(bytes_to_host(device, measure_seconds))
    return {
        "host_link_bandwidth": (link, "measured: pinned memory, the slower direction"),
        "host_memory_bandwidth": (share, "measured: a copy on the host, by all ranks of this machine"),
    }


def _measure_links(device: torch.device, local_ranks: int, size: int) -> dict[str, tuple[float, str]]:
    """Measure the links between ranks; measure none if machines have different numbers of ranks."""
    if size % local_ranks:
        return {}
    constants: dict[str, tuple[float, str]] = {}
    if local_ranks > 1:
        groups = [dist.new_group([*range(k, k + local_ranks)]) for k in range(0, size, local_ranks)]
        links = _measure_group(
            groups[dist.get_rank() // local_ranks], dist.get_rank() // local_ranks * local_ranks, 1, local_ranks, device
        )
        source = f"measured: all_gather of {local_ranks} ranks of this machine"
        constants |= {"link_bandwidth": (links.bandwidth, source), "latency_seconds": (links.latency_seconds, source)}
        constants |= {"hop_seconds": (links.hop_seconds, "measured: half a round trip of a message")}
    if size > local_ranks:
        groups = [dist.new_group([*range(k, size, local_ranks)]) for k in range(local_ranks)]
        links = _measure_group(
            groups[dist.get_rank() % local_ranks],
            dist.get_rank() % local_ranks,
            local_ranks,
            size // local_ranks,
            device,
        )
        source = f"measured: all_gather of {size // local_ranks} ranks, one of each machine"
        constants |= {
            "network_bandwidth": (links.bandwidth, source),
            "network_hop_seconds": (links.hop_seconds, "measured: half a round trip of a message"),
        }
        if local_ranks <= 1:
            constants |= {"latency_seconds": (links.latency_seconds, source)}
    return constants


def _measure_group(group: Any, first_rank: int, stride: int, ranks: int, device: torch.device) -> _Links:
    """Measure the links of a group: by a large all_gather, a small one, and a message between its first two ranks."""
    numel = (64 if is_accelerator(device) else 4) << 18
    hop = 0.0
    if dist.get_rank() in (first_rank, first_rank + stride):
        hop = measure_message_seconds(first_rank, first_rank + stride, device, _TIMED_ROUNDS)
    small_seconds, large_seconds = (gather_seconds(n, group, device, _TIMED_ROUNDS) for n in (1, numel))
    hop, small_seconds, large_seconds = (-_slowest_rank_speed(-x) for x in (hop, small_seconds, large_seconds))
    return _fit_links(hop, small_seconds, large_seconds, 4 * numel * ranks, ranks)


def _fit_links(hop: float, small_seconds: float, large_seconds: float, total: int, ranks: int) -> _Links:
    """Fit the constants of the cost model to the times of three messages.

    Args:
        hop: seconds of a message of a few bytes.
        small_seconds: seconds of an all_gather of a few bytes.
        large_seconds: seconds of a large all_gather.
        total: bytes of the large all_gather, over all ranks.
        ranks: the number of ranks in the group.
    """
    hop = min(hop, 0.9 * small_seconds / (ranks - 1))  # so that the latency stays above 0
    speed = total * (ranks - 1) / ranks / max(large_seconds - small_seconds, 0.1 * large_seconds)
    return _Links(speed, small_seconds - (ranks - 1) * hop, hop, ranks)


def _make_machine(device: torch.device, constants: dict[str, tuple[float, str]]) -> Machine:
    """Make a machine from the measured constants. The rest is assumed, as for an H100 or a CPU."""
    base = CPU if device.type == "cpu" else H100
    local_ranks = int(constants["ranks"][0])
    if device.type == "cpu":
        name, memory = f"{os.cpu_count()} cores of {_processor_name()}", _host_bytes() / local_ranks
    else:
        properties = torch.get_device_module(device).get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    name = f"{local_ranks} x {name}" if is_accelerator(device) else name
    constants |= {"device_bytes": (_USABLE_SHARE * memory, f"{_USABLE_SHARE:.0%} of {memory / 1e9:,.0f} GB")}
    constants |= {"host_copy_bandwidth": constants["host_memory_bandwidth"]}
    missing = {name for name, _, _ in base.sources} - {*constants}
    sources = [(name, value, source) for name, (value, source) in constants.items()]
    sources += [
        (name, value, f"assumed, as for {base.name}: {reason}")
        for name, value, reason in base.sources
        if name in missing
    ]
    values = {name: value for name, value, _ in sources} | {"ranks": local_ranks}
    source_text = (
        f"measured on {platform.node()}, torch {torch.version.__version__}, {torch.get_num_threads()} threads a rank"
    )
    return Machine(name, **values, kind=device.type, source=source_text, sources=tuple(sources))  # pyright: ignore


def _processor_name() -> str:
    """Return the model name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.partition(":")[2].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _host_bytes() -> int:
    """Return the bytes of this machine's memory, or the limit of this process's cgroup if that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as f:
            return min(memory, int(f.read()))
    except (OSError, ValueError):  # there is no limit
        return memory
