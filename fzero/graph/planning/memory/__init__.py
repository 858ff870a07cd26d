"""The memory of a plan: live ranges of storages, their kinds, kernels' workspaces, and what the allocator reserves."""

from fzero.graph.planning.memory._caching_allocator import AllocatorPeaks, simulate_allocator
from fzero.graph.planning.memory._live_ranges import (
    ITERATION,
    Range,
    device_live_bytes,
    iteration_peak_bytes,
    iteration_ranges,
    live_bytes,
    live_ranges,
    peak_bytes,
    record_peak,
)
from fzero.graph.planning.memory._storage_kinds import KINDS

__all__ = [
    "ITERATION",
    "KINDS",
    "AllocatorPeaks",
    "Range",
    "device_live_bytes",
    "iteration_peak_bytes",
    "iteration_ranges",
    "live_bytes",
    "live_ranges",
    "peak_bytes",
    "record_peak",
    "simulate_allocator",
]
