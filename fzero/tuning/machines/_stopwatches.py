"""Stopwatches for products, copies, small operations and messages."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fzero._torch import c10d, is_accelerator, wait_for_device

__all__ = ["bytes_to_host", "copy_speed", "gather_seconds", "measure_message_seconds", "product_speed", "small_seconds"]


_GROUP_OPERATIONS = 20  # small operations between two readings of the clock


def _median_seconds(f: Callable[[], Any], device: torch.device, measure_seconds: float, group: int = 1) -> float:
    """Return the median seconds of a call, over as many calls as fit `measure_seconds`, and at least one.

    Args:
        f: the function to call. A first call is not counted.
        device: the device whose work is waited for.
        measure_seconds: the seconds in which calls begin.
        group: how many calls there are between two readings of the clock.
    """

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            f()
        wait_for_device(device)
        return (time.perf_counter() - start) / times

    run(1)
    samples = []
    deadline = time.perf_counter() + measure_seconds
    while not samples or time.perf_counter() < deadline:
        samples.append(run(group))
    return statistics.median(samples)


def product_speed(dtype: torch.dtype, device: torch.device, measure_seconds: float) -> float:
    """Return the floating-point operations a second of a product of square matrices."""
    n = 4096 if is_accelerator(device) else 512  # half precision without hardware support takes 0.3 s at 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device, measure_seconds)


def copy_speed(device: torch.device, measure_seconds: float) -> float:
    """Return the bytes a second that a copy of 64 MB (256 MB on a GPU) reads and writes."""
    a = torch.zeros((64 if device.type == "cpu" else 256) << 18, device=device)
    b = torch.empty_like(a)
    return 2 * 4 * a.numel() / _median_seconds(lambda: b.copy_(a), device, measure_seconds)


def small_seconds(dtype: torch.dtype, device: torch.device, measure_seconds: float) -> float:
    """Return the seconds of an operation on a few elements."""
    a = torch.zeros(16, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return _median_seconds(lambda: torch.add(a, a, out=out), device, measure_seconds, _GROUP_OPERATIONS)


def bytes_to_host(device: torch.device, measure_seconds: float) -> float:
    """Return the bytes a second between a GPU and pinned memory of its host, in the slower direction."""
    host = torch.empty(64 << 18, pin_memory=True, device="cpu")
    on_device = torch.empty_like(host, device=device)
    to_device_seconds = _median_seconds(lambda: on_device.copy_(host), device, measure_seconds / 2)
    to_host_seconds = _median_seconds(lambda: host.copy_(on_device), device, measure_seconds / 2)
    return 4 * host.numel() / max(to_device_seconds, to_host_seconds)


def gather_seconds(numel: int, group: Any, device: torch.device, times: int) -> float:
    """Return the median seconds of an all_gather of `numel` float32 a rank. All ranks of the group must call it."""
    shard, ranks = torch.zeros(numel, device=device), dist.get_world_size(group)

    def gather() -> torch.Tensor:  # as in a jitted step
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, ranks, group.group_name))

    return _median_round(gather, device, times)


def measure_message_seconds(first_rank: int, second_rank: int, device: torch.device, times: int) -> float:
    """Return half the seconds of a round trip of a few bytes between two ranks. Only these two ranks call it."""
    x, rank = torch.zeros(1, device=device), dist.get_rank()

    def both_ways() -> None:
        if rank == first_rank:
            dist.send(x, second_rank)
            dist.recv(x, second_rank)
        else:
            dist.recv(x, first_rank)
            dist.send(x, first_rank)

    return _median_round(both_ways, device, times) / 2


def _median_round(f: Callable[[], Any], device: torch.device, times: int) -> float:
    """Return the median seconds of a collective call. Each rank makes the same number of calls."""
    seconds = []
    for i in range(times + 2):
        start = time.perf_counter()
        f()
        wait_for_device(device)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
