"""calibrate: what this machine reaches, measured in some seconds, as a machine that the cost model takes."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero._torch import c10d
from fzero._tracebacks import api_boundary
from fzero.ranks import mesh
from fzero.tuning._machines import CPU, H100, Machine

__all__ = [
    "bytes_to_host",
    "calibrate",
    "copy_speed",
    "gather_seconds",
    "message_seconds",
    "product_speed",
    "small_seconds",
]

# Stopwatches: how long products, copies, small operations and messages take on this machine.


GROUP = 20  # small operations between two looks at the clock


def _seconds(f: Callable[[], Any], device: torch.device, budget: float, group: int = 1) -> float:
    """Return the median time of a call, over as many as fit a budget of seconds, and at least one.

    Args:
        f: what is called; once before, which does not count.
        device: that its work is waited for on.
        budget: in seconds.
        group: how many calls there are between two looks at the clock.
    """

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / times

    run(1)
    found, end = [], time.perf_counter() + budget
    while not found or time.perf_counter() < end:
        found.append(run(group))
    return statistics.median(found)


def product_speed(dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Return floating-point operations a second of a product of square matrices."""
    n = 4096 if device.type == "cuda" else 512  # half precision without instructions for it takes 0.3 s
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _seconds(lambda: torch.mm(a, b, out=out), device, budget)


def copy_speed(device: torch.device, budget: float) -> float:
    """Return bytes a second that a copy of 64 MB (256 on a GPU) reads and writes."""
    a = torch.zeros((64 if device.type == "cpu" else 256) << 18, device=device)
    b = torch.empty_like(a)
    return 2 * 4 * a.numel() / _seconds(lambda: b.copy_(a), device, budget)


def small_seconds(dtype: torch.dtype, device: torch.device, budget: float) -> float:
    """Return how long an operation on a few elements takes."""
    a = torch.zeros(16, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return _seconds(lambda: torch.add(a, a, out=out), device, budget, GROUP)


def bytes_to_host(device: torch.device, budget: float) -> float:
    """Return bytes a second between a GPU and its host's pinned memory, of the slower way."""
    host = torch.empty(64 << 18, pin_memory=True)
    there = torch.empty_like(host, device=device)
    up = _seconds(lambda: there.copy_(host), device, budget / 2)
    down = _seconds(lambda: host.copy_(there), device, budget / 2)
    return 4 * host.numel() / max(up, down)


def gather_seconds(numel: int, group: Any, device: torch.device, times: int) -> float:
    """Return how long an all_gather of so many float32 a rank takes, the median. All ranks of the group call it."""
    part, ranks = torch.zeros(numel, device=device), dist.get_world_size(group)

    def gathered() -> torch.Tensor:  # as a jitted step does
        return c10d.wait_tensor(c10d.all_gather_into_tensor(part, ranks, group.group_name))

    return _together(gathered, device, times)


def message_seconds(one: int, other: int, device: torch.device, times: int) -> float:
    """Return how long a message of a few bytes between two ranks takes, half a round trip. Only these two call it."""
    x, rank = torch.zeros(1, device=device), dist.get_rank()

    def both_ways() -> None:
        if rank == one:
            dist.send(x, other)
            dist.recv(x, other)
        else:
            dist.recv(x, one)
            dist.send(x, one)

    return _together(both_ways, device, times) / 2


def _together(f: Callable[[], Any], device: torch.device, times: int) -> float:
    """Return the median time of a call that others make too: as often on each rank, whatever its clock says."""
    found = []
    for i in range(times + 2):
        began = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 2:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEPT = 0.93  # of a device's memory, as of the machines by name
ROUNDS = 20  # of each message


class Links(NamedTuple):
    """What messages between ranks take.

    Attributes:
        speed: bytes a second.
        latency: seconds of a collective, without the steps of its ring.
        hop: seconds of a step.
        ranks: that were measured.
    """

    speed: float
    latency: float
    hop: float
    ranks: int


@api_boundary
def calibrate(seconds: float = 5.0) -> Machine:
    """Measure what this machine reaches: a product, a copy and a small operation of each dtype, and links if it can.

    Alone it measures one device. Under torchrun all ranks measure at once, as they train, and the links between them:
    within a machine, and between machines where there are several. What was not measured is assumed, and says so.

    Args:
        seconds: that it may take, about.

    Returns:
        A `Machine`; `print(machine.constants())` lists each constant with its source. `fzero calibrate` stores it in
        the user's cache folder, and `device="calibrated"` takes it from there.

    Raises:
        ValueError: if `seconds` is no number above 0.

    Example:
        >>> from fzero import tuning
        >>> machine = tuning.calibrate(0.1)
        >>> machine.kind, machine.flops > 1e8, machine.launch < 1e-2
        ('cpu', True, True)
        >>> machine.constants()[2].source
        'measured: a copy'
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: expected a number above 0")
    ranks = mesh(dp=-1) if _launched() else None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    near = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks is not None else max(torch.cuda.device_count(), 1)
    part = seconds / 8
    speeds = {dtype: _slowest(product_speed(dtype, device, part)) for dtype in DTYPES}
    small = {dtype: -_slowest(-small_seconds(dtype, device, part / 2)) for dtype in DTYPES}
    full, half, other = (speeds[dtype] for dtype in DTYPES)
    measured = {
        "flops": (half, f"measured: bfloat16; float16 has {other / half:.2g} times as many"),
        "slow": (half / full, f"measured: {full / 1e12:,.3g} TFLOP/s of float32"),
        "device_memory": (copied := _slowest(copy_speed(device, part)), "measured: a copy"),
        "launch": (max(small.values()), "measured: a sum of 16 elements, of the slowest dtype"),
        "ranks": (near, "devices that are at hand" if ranks is None else "processes of this machine"),
    }
    measured |= _of_the_host(device, copied, near, part)
    measured |= _of_links(device, near, ranks.size) if ranks is not None and ranks.size > 1 else {}
    return _machine(device, measured)


def _launched() -> bool:
    return dist.is_available() and (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) > 1)


def _slowest(speed: float) -> float:
    """Return the least of what all ranks have measured, so that each says the same."""
    if not (dist.is_available() and dist.is_initialized()):
        return speed
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, speed)
    return min(found)


def _of_the_host(device: torch.device, copied: float, near: int, part: float) -> dict[str, tuple[float, str]]:
    """Measure the host's memory, and the copies between it and the device."""
    if device.type == "cpu":
        own = (copied, "measured: a copy, within the one memory that there is")
        return {"link": own, "host_memory": (copied * near, "measured: a copy, of all ranks of this machine")}
    share = _slowest(copy_speed(torch.device("cpu"), part)) * near
    return {
        "link": (_slowest(bytes_to_host(device, part)), "measured: pinned memory, the slower way"),
        "host_memory": (share, "measured: a copy on the host, of all ranks of this machine"),
    }


def _of_links(device: torch.device, near: int, size: int) -> dict[str, tuple[float, str]]:
    """Measure the links between ranks, if all machines have as many."""
    if size % near:
        return {}
    found: dict[str, tuple[float, str]] = {}
    if near > 1:
        groups = [dist.new_group([*range(k, k + near)]) for k in range(0, size, near)]
        links = _links(groups[dist.get_rank() // near], dist.get_rank() // near * near, 1, near, device)
        said = f"measured: all_gather of {near} ranks of this machine"
        found |= {"peers": (links.speed, said), "latency": (links.latency, said)}
        found |= {"hop": (links.hop, "measured: half a round trip of a message")}
    if size > near:
        groups = [dist.new_group([*range(k, size, near)]) for k in range(near)]
        links = _links(groups[dist.get_rank() % near], dist.get_rank() % near, near, size // near, device)
        said = f"measured: all_gather of {size // near} ranks, one of each machine"
        found |= {"network": (links.speed, said), "far_hop": (links.hop, "measured: half a round trip of a message")}
        found |= {} if near > 1 else {"latency": (links.latency, said)}
    return found


def _links(group: Any, first: int, stride: int, ranks: int, device: torch.device) -> Links:
    """Measure the links of a group: a large all_gather, a small one, and a message between its first two ranks."""
    numel = (64 if device.type == "cuda" else 4) << 18
    hop = 0.0
    if dist.get_rank() in (first, first + stride):
        hop = message_seconds(first, first + stride, device, ROUNDS)
    small, large = (gather_seconds(n, group, device, ROUNDS) for n in (1, numel))
    hop, small, large = (-_slowest(-x) for x in (hop, small, large))
    return links_of(hop, small, large, 4 * numel * ranks, ranks)


def links_of(hop: float, small: float, large: float, total: int, ranks: int) -> Links:
    """Return the constants by which the cost model says what three messages took.

    Args:
        hop: seconds of a message of a few bytes.
        small: of an all_gather of a few bytes.
        large: of one of many bytes.
        total: how many these are, of all ranks.
        ranks: of the group.
    """
    hop = min(hop, 0.9 * small / (ranks - 1))  # so that something is left for the collective
    speed = total * (ranks - 1) / ranks / max(large - small, 0.1 * large)
    return Links(speed, small - (ranks - 1) * hop, hop, ranks)


def _machine(device: torch.device, measured: dict[str, tuple[float, str]]) -> Machine:
    """Make a machine of what was measured, and of what is assumed where nothing was."""
    like = CPU if device.type == "cpu" else H100
    near = int(measured["ranks"][0])
    if device.type == "cpu":
        name, memory = f"{os.cpu_count()} cores of {_processor()}", _host_bytes() / near
    else:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    name = f"{near} x {name}" if device.type == "cuda" else name
    measured |= {"device_bytes": (KEPT * memory, f"{KEPT:.0%} of {memory / 1e9:,.0f} GB")}
    measured |= {"host_copies": measured["host_memory"]}
    told = {name for name, _, _ in like.sources} - {*measured}
    sources = [(name, value, source) for name, (value, source) in measured.items()]
    sources += [
        (name, value, f"assumed, as of {like.name}: {why}") for name, value, why in like.sources if name in told
    ]
    values = {name: value for name, value, _ in sources} | {"ranks": near}
    where = (
        f"measured on {platform.node()}, torch {torch.version.__version__}, {torch.get_num_threads()} threads a rank"
    )
    return Machine(name, **values, kind=device.type, source=where, sources=tuple(sources))  # pyright: ignore


def _processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.partition(":")[2].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _host_bytes() -> int:
    """Return the bytes of this machine's memory, or of the part of it that this process may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="utf-8") as f:
            return min(memory, int(f.read()))
    except (OSError, ValueError):  # there is no such limit
        return memory
