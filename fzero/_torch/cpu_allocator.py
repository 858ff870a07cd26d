"""Private torch APIs that follow the CPU's allocator.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_allocations.py` shows which.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from fzero._torch.running_transforms import is_profiling

__all__ = ["Allocations", "allocations"]


class Allocations:
    """The memory that code allocated on the CPU: `peak` is the largest increase over the start, in bytes.

    `peak` is None while the code runs, and if the user's profiler was on.
    """

    peak: int | None = None


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Follow the allocations of this thread, and of the threads that torch starts for it. Other threads do not count.

    It uses the profiler from before Kineto, which records the same events, and logs nothing.
    """
    record = Allocations()
    if is_profiling():
        yield record
        return
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    config: Any = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        yield record
    finally:
        threads = autograd._disable_profiler_legacy()
    record.peak = _peak_bytes(threads)


def _peak_bytes(threads: list[list[Any]]) -> int:
    """Return the peak of the allocated bytes, from the events of all threads in the order of their times."""
    events = [e for thread in threads for e in thread]
    start = next(e for e in events if e.name() == "__start_profile")
    memory = [e for e in events if e.kind() == "memory_alloc"]
    live = peak = 0
    for event in sorted(memory, key=start.cpu_elapsed_us):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak
