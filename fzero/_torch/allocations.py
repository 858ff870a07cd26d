"""Private torch APIs that tell what the CPU's allocator does while something runs.

They were seen on torch 2.11 and 2.13. `tests/_torch/test_allocations.py` says which one broke when torch changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from fzero._torch.autograd import profiling

__all__ = ["Allocations", "allocations"]


class Allocations:
    """What the CPU's allocator did: `peak` is the most that was held at once beside what was held before, in bytes.

    It is None while it runs, and where a profiler of the user's was on.
    """

    peak: int | None = None


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Follow this thread's allocations, and those of the threads that torch starts for it; others' are not seen.

    This is the profiler from before Kineto. It tells the same events, and logs nothing.
    """
    found = Allocations()
    if profiling():
        yield found
        return
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    config: Any = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        threads = autograd._disable_profiler_legacy()
    found.peak = _peak(threads)


def _peak(threads: list[list[Any]]) -> int:
    """Return the most that is held at once, by the events of all threads in the order of their times."""
    events = [e for thread in threads for e in thread]
    start = next(e for e in events if e.name() == "__start_profile")
    memory = [e for e in events if e.kind() == "memory_alloc"]
    held = peak = 0
    for event in sorted(memory, key=start.cpu_elapsed_us):
        held += event.cpu_memory_usage()
        peak = max(peak, held)
    return peak
