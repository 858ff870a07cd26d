"""Candidate schedules of one step, and which of them is kept."""

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch.fx import Graph, Node

from fzero._notice import see
from fzero.graph._ir import full_bytes, is_collective, is_reduction, parameter_gathers
from fzero.graph._pass_manager import FITTING, Choice, Knobs, PassContext, PassManager
from fzero.graph.loop._scan import graphs_in, loop_of, shared_graphs
from fzero.graph.planning._cost import seconds
from fzero.graph.planning._liveness import peak_bytes
from fzero.graph.planning._plan import Settings

__all__ = ["Candidate", "candidates", "choose"]

SLACK = 1.03  # without a budget, what a faster schedule may take of the smallest peak

T = TypeVar("T")


class Candidate(NamedTuple):
    """One way to schedule a step.

    Attributes:
        choice: the settings of the passes.
        graph: the scheduled graph.
        peak_bytes: the most that is alive at any time, arguments included.
        seconds: what the cost model says.
    """

    choice: Choice
    graph: Graph
    peak_bytes: int
    seconds: float

    @property
    def settings(self) -> Settings:
        """The settings that a plan tells, and that ranks agree on."""
        return self.choice.settings()


def candidates(graph: Graph, given: PassContext, knobs: Knobs) -> list[Candidate]:
    """Schedule a traced graph in every way that the knobs leave open.

    Each choice of recompute, re-gather and buckets is scheduled first so that it takes the least memory. Those that fit
    are then scheduled in the other orders too, which start collectives ahead.
    """
    passes, ratings = PassManager(graph, given), dict[Graph, tuple[int, float]]()
    knobs = knobs if _gathers(graph) else knobs._replace(prefetch=0)
    (ahead, flying), *more = _ways(knobs, any(is_reduction(n) for part in graphs_in(graph) for n in part.nodes))
    leanest = [c._replace(prefetch=ahead, in_flight=flying) for c in _choices(passes, knobs)]
    first = _with_recast(passes, knobs, [_rated(passes, c, ratings) for c in leanest], ratings)
    # what is in flight takes memory: what does not fit already need not be tried; what starts ahead does so for free
    room = max(min(c.peak_bytes for c in first), knobs.memory_budget or 0)
    limit = max(room, _limit(first, knobs.memory_budget))
    later = [
        _rated(passes, c.choice._replace(prefetch=ahead, in_flight=flying, room=room), ratings)
        for c in first
        if c.peak_bytes <= limit
        for ahead, flying in more
    ]
    across = [
        _rated(passes, c.choice._replace(across_turns=True), ratings)
        for c in first + later
        if c.choice.in_flight and c.peak_bytes <= limit and knobs.across_turns is not False
    ]
    across = [c for c in across if _carries(c.graph)]
    found = across if across and knobs.across_turns is True else first + later + across
    return [c for c in found if knobs.prefetch in ("auto", c.choice.prefetch)] or first


def _with_recast(
    passes: PassManager, knobs: Knobs, found: list[Candidate], ratings: dict[Graph, tuple[int, float]]
) -> list[Candidate]:
    """Add to schedules those in which wide copies are made again, where that takes less memory; or as was asked."""
    if knobs.recast is False:
        return found
    choices = [c.choice._replace(recast=True) for c in found]
    made = [_rated(passes, c, ratings) if passes.changed_by(c, "recast") else None for c in choices]
    if knobs.recast is True:
        return [new or old for old, new in zip(found, made, strict=True)]
    return found + [new for old, new in zip(found, made, strict=True) if new and new.peak_bytes < old.peak_bytes]


def _carries(graph: Graph) -> bool:
    """Return whether a loop of a graph leaves reductions on their way from turn to turn."""
    return any(loop.carried for n in graph.nodes if (loop := loop_of(n)))


def _gathers(graph: Graph) -> list[Node]:
    """List the gathers of parameters, those in loops too."""
    return [g for part in graphs_in(graph) for g in parameter_gathers(part)]


def _choices(passes: PassManager, knobs: Knobs) -> list[Choice]:
    """List what may be computed again, gathered again and joined, as far as the knobs leave it open."""
    graph = passes.traced
    gathers = _gathers(graph)
    shared = [g for part in shared_graphs(graph) for g in parameter_gathers(part)] or gathers
    reuses = _options(knobs.max_reuse_bytes, [_small_bytes(shared), math.inf]) if gathers else [math.inf]
    agains = _options(knobs.recompute, [False, True])
    (size,) = _options(knobs.bucket_bytes, [_bucket_bytes(graph)])
    found = [Choice(again, reuse, size) for again, reuse in itertools.product(agains, reuses)]
    if len(agains) > 1 and not passes.changed_by(found[-1], "recompute"):
        return [c for c in found if not c.recompute]  # there is nothing to compute again
    return found


def _ways(knobs: Knobs, reduces: bool) -> list[tuple[int | str, int]]:
    """List how collectives may run beside work, `(prefetch, in_flight)`: first the one that takes least memory.

    The room for "fitting" gathers is measured by the first.
    """
    ahead = [0, FITTING] if knobs.prefetch in ("auto", FITTING) else [knobs.prefetch]
    flying = _options(knobs.in_flight, [0, 1] if reduces else [0])
    return list(itertools.product(ahead, flying))


def _rated(passes: PassManager, choice: Choice, ratings: dict[Graph, tuple[int, float]]) -> Candidate:
    """Schedule a graph by a choice, and rate what no other choice made before."""
    scheduled = passes.scheduled(choice)
    if scheduled not in ratings:
        ratings[scheduled] = peak_bytes(scheduled), seconds(scheduled, passes.given.device)
    return Candidate(choice, scheduled, *ratings[scheduled])


def _limit(found: Sequence[Candidate], budget: float | None) -> float:
    """Return how many bytes a schedule may take."""
    return budget if budget is not None else SLACK * min(c.peak_bytes for c in found)


def _options(knob: T | str, auto: list[T]) -> list[T]:
    return auto if isinstance(knob, str) else [knob]


def choose(found: Sequence[Candidate], budget: float | None, name: str) -> int:
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
            f"ranks, more micro-batches or smaller units need less{see('out-of-memory')}",
            stacklevel=2,
        )
        fits = [i for i, c in enumerate(found) if c.peak_bytes == smallest]
    return min(fits, key=lambda i: (found[i].seconds, found[i].peak_bytes, i))


def _small_bytes(gathers: Sequence[Node]) -> int:
    """Return the size of units that may come between two uses of another: an eighth of the largest."""
    return max(full_bytes(g) for g in gathers) // 8


def _bucket_bytes(graph: Graph) -> int:
    """Return a size for buckets that adds nothing to the peak: no more than the largest unit, nor than a megabyte."""
    sizes = [full_bytes(n) for part in shared_graphs(graph) for n in part.nodes if is_collective(n)]
    return min(max(sizes, default=0), 1 << 20)
