"""Candidate schedules of one step, and which of them is kept."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Graph

from fzero.graph._cost import seconds
from fzero.graph._liveness import live_bytes, live_ranges
from fzero.graph.ir import is_gather, is_reduction
from fzero.graph.passes import bucket, donate, regather, schedule
from fzero.graph.passes._bucket import full_bytes
from fzero.graph.passes._regather import parameter_gathers

__all__ = ["Candidate", "Knobs", "candidates", "choose"]

SLACK = 1.02  # without a budget, what a faster schedule may take of the smallest peak


class Knobs(NamedTuple):
    """What the user asks of the schedule; "auto" leaves it to the cost model."""

    prefetch: int | str = "auto"
    bucket_bytes: int | str = "auto"
    max_reuse_bytes: float | str = "auto"
    memory_budget: int | None = None


class Candidate(NamedTuple):
    """One way to schedule a step.

    Attributes:
        settings: the passes' arguments.
        graph: the scheduled graph.
        peak_bytes: the most that is alive at any time, arguments included.
        seconds: what the cost model says.
    """

    settings: dict[str, Any]
    graph: Graph
    peak_bytes: int
    seconds: float


def candidates(graph: Graph, pairs: Sequence[tuple[int, int]], donated: Sequence[int], knobs: Knobs) -> list[Candidate]:
    """Schedule a traced graph in every way that the knobs leave open."""
    gathers = parameter_gathers(graph)
    reuses, ahead, in_flight = [math.inf], [0], [0]
    if gathers:
        reuses = [0, math.inf] if knobs.max_reuse_bytes == "auto" else [knobs.max_reuse_bytes]
        ahead = [0, 1] if knobs.prefetch == "auto" else [knobs.prefetch]
    if knobs.memory_budget is not None and any(is_reduction(n) for n in graph.nodes):
        in_flight = [0, 1]  # it lets gradients of two units be alive: only where there is a budget to say that they may
    found = []
    for reuse in reuses:
        settled = regather(graph, reuse) if gathers else graph  # pyright: ignore[reportArgumentType]
        size = _bucket_bytes(settled) if knobs.bucket_bytes == "auto" else knobs.bucket_bytes
        settled = donate(bucket(settled, size) if size else settled, pairs, donated)  # pyright: ignore
        for k, m in itertools.product(ahead, in_flight):
            scheduled = schedule(settled, k, m)  # pyright: ignore[reportArgumentType]
            settings = {"max_reuse_bytes": reuse, "bucket_bytes": size, "prefetch": k, "in_flight": m}
            found.append(Candidate(settings, scheduled, peak_bytes(scheduled), seconds(scheduled)))
    return found


def choose(found: Sequence[Candidate], budget: int | None, name: str) -> int:
    """Return the index of the candidate to keep.

    With a budget (bytes): the fastest that fits, else the smallest, with a warning. Without: the fastest of those
    within 2% of the smallest, so that a stage keeps its promise of memory.
    """
    smallest = min(c.peak_bytes for c in found)
    limit = budget if budget is not None else SLACK * smallest
    fits = [i for i, c in enumerate(found) if c.peak_bytes <= limit]
    if not fits:
        warnings.warn(
            f"fzero.jit: {name} needs {smallest:,} bytes at its peak with the smallest of {len(found)} schedules, "
            f"{smallest - limit:,.0f} more than memory_budget={budget:,}; that one is kept. A higher stage, more "
            "ranks, more micro-batches or smaller units need less",
            stacklevel=2,
        )
        fits = [i for i, c in enumerate(found) if c.peak_bytes == smallest]
    return min(fits, key=lambda i: (found[i].seconds, found[i].peak_bytes, i))


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes that are alive at any time of a scheduled graph, its arguments included."""
    return max(live_bytes(live_ranges(graph), len(graph.nodes)))


def _bucket_bytes(graph: Graph) -> int:
    """Return a size for buckets that adds nothing to the peak: no more than the largest unit, nor than a megabyte."""
    sizes = [full_bytes(n) for n in graph.nodes if is_gather(n) or is_reduction(n)]
    return min(max(sizes, default=0), 1 << 20)
