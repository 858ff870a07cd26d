"""Stopwatches: how long products, copies, small operations and messages take on this machine."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fzero._torch import c10d

__all__ = ["bytes_to_host", "copy_speed", "gather_seconds", "message_seconds", "product_speed", "small_seconds"]

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
