"""Peak memory by the allocator's own events."""

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(f: Callable[[], Any]) -> int:
    """Return the largest number of bytes that `f()` held at once above what was held before."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        f()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
