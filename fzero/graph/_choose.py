"""Candidate schedules of one step, and which of them is kept."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Graph

from fzero.graph._wire import full_bytes
from fzero.graph.ir import is_collective, is_reduction
from fzero.graph.passes import bucket, donate, gather_into, in_place, recompute, regather, schedule
from fzero.graph.passes._regather import parameter_gathers
from fzero.graph.plan._cost import seconds
from fzero.graph.plan._liveness import live_bytes, live_ranges

__all__ = ["FITTING", "Candidate", "Knobs", "candidates", "choose"]

FITTING = "fitting"  # of prefetch: one ahead, where there is room

SLACK = 1.03  # without a budget, what a faster schedule may take of the smallest peak


class Knobs(NamedTuple):
    """What the user asks of the schedule; "auto" leaves it to the cost model."""

    prefetch: int | str = "auto"
    in_flight: int | str = "auto"
    bucket_bytes: int | str = "auto"
    max_reuse_bytes: float | str = "auto"
    memory_budget: int | None = None
    recompute: bool | str = "auto"


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


def candidates(
    graph: Graph, pairs: Sequence[tuple[int, int]], donated: Sequence[int], knobs: Knobs, functional: bool = False
) -> list[Candidate]:
    """Schedule a traced graph in every way that the knobs leave open; `functional`: no collective overwrites."""
    gathers = bool(parameter_gathers(graph))
    knobs = knobs if gathers else knobs._replace(prefetch=0)
    reuses = _options(knobs.max_reuse_bytes, [_small_bytes(graph), math.inf]) if gathers else [math.inf]
    kept = {again: recompute(graph) if again else graph for again in _options(knobs.recompute, [False, True])}
    if len(kept) > 1 and len(kept[True].nodes) == len(graph.nodes):
        del kept[True]  # there is nothing to compute again
    least, *more = _ways(knobs, any(is_reduction(n) for n in graph.nodes))
    found: list[tuple[Graph, Candidate]] = []
    for again, reuse in itertools.product(kept, reuses):
        gathered = regather(kept[again], reuse)
        (size,) = _options(knobs.bucket_bytes, [_bucket_bytes(gathered)])
        settled = donate(bucket(gathered, size), pairs, donated)
        settled = settled if functional else gather_into(in_place(settled))
        settings = {"recompute": again, "max_reuse_bytes": reuse, "bucket_bytes": size}
        found.append((settled, _candidate(settled, {**settings, **least})))
    first = [c for _, c in found]
    # what is in flight takes memory: what does not fit already need not be tried; what starts ahead does so for free
    room = max(min(c.peak_bytes for c in first), knobs.memory_budget or 0)
    limit = max(room, _limit(first, knobs.memory_budget))
    later = [_candidate(g, {**c.settings, **m}, room) for g, c in found for m in more if c.peak_bytes <= limit]
    return [c for c in first + later if knobs.prefetch in ("auto", c.settings["prefetch"])] or first


def _ways(knobs: Knobs, reduces: bool) -> list[dict[str, Any]]:
    """List how collectives may run beside work: first as what "fitting" is measured by, which takes least memory."""
    ahead = [0, FITTING] if knobs.prefetch in ("auto", FITTING) else [knobs.prefetch]
    flying = _options(knobs.in_flight, [0, 1] if reduces else [0])
    return [{"prefetch": k, "in_flight": j} for k, j in itertools.product(ahead, flying)]


def _candidate(graph: Graph, settings: dict[str, Any], room: float = math.inf) -> Candidate:
    """Schedule a graph so; up to `room` bytes "fitting" gathers start ahead."""
    ahead, flying = settings["prefetch"], settings["in_flight"]
    scheduled = schedule(graph, 1, flying, room) if ahead == FITTING else schedule(graph, ahead, flying)
    return Candidate(settings, scheduled, peak_bytes(scheduled), seconds(scheduled))


def _limit(found: Sequence[Candidate], budget: int | None) -> float:
    """Return how many bytes a schedule may take."""
    return budget if budget is not None else SLACK * min(c.peak_bytes for c in found)


def _options(knob: Any, auto: list[Any]) -> list[Any]:
    return auto if knob == "auto" else [knob]


def choose(found: Sequence[Candidate], budget: int | None, name: str) -> int:
    """Return the index of the candidate to keep.

    With a budget (bytes): the fastest that fits, else the smallest, with a warning. Without: the fastest of those
    within 3% of the smallest, so that a stage keeps its promise of memory.
    """
    smallest, limit = min(c.peak_bytes for c in found), _limit(found, budget)
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


def _small_bytes(graph: Graph) -> int:
    """Return the size of units that may come between two uses of another: an eighth of the largest."""
    return max([full_bytes(g) for g in parameter_gathers(graph)]) // 8


def _bucket_bytes(graph: Graph) -> int:
    """Return a size for buckets that adds nothing to the peak: no more than the largest unit, nor than a megabyte."""
    sizes = [full_bytes(n) for n in graph.nodes if is_collective(n)]
    return min(max(sizes, default=0), 1 << 20)
