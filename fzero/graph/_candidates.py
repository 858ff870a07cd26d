"""Candidate schedules of one step, and the choice between them."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch.fx import Graph, Node

from fzero._notice import trouble_link
from fzero.graph._pass_manager import PassContext, PassManager, PassSettings
from fzero.graph._schedule_options import FITTING, ScheduleOptions
from fzero.graph.ir import full_bytes, is_collective, is_reduce_collective, parameter_gathers
from fzero.graph.loop import graphs_in, node_loop, shared_graphs
from fzero.graph.planning import PlanSettings, estimate_seconds, peak_bytes

__all__ = ["PEAK_TOLERANCE", "Candidate", "candidates", "choose"]

PEAK_TOLERANCE = 1.03  # without a budget, a faster schedule's peak may be this many times the smallest peak

_T = TypeVar("_T")
_Rate = Callable[[Graph], tuple[int, float]]  # returns the peak in bytes and the duration in seconds


class Candidate(NamedTuple):
    """One way to schedule a step.

    Attributes:
        pass_settings: the settings of the passes.
        graph: the scheduled graph.
        peak_bytes: the largest number of live bytes, arguments included.
        seconds: the duration by the cost model.
    """

    pass_settings: PassSettings
    graph: Graph
    peak_bytes: int
    seconds: float

    @property
    def settings(self) -> PlanSettings:
        """The settings that a plan shows and that ranks agree on."""
        return self.pass_settings.shown_in_plan()


class _Scheduler(NamedTuple):
    """Schedules one traced graph by settings, and rates the results.

    Attributes:
        passes: the passes over the graph.
        options: what the user restricts.
        rate: returns the peak and the duration of a scheduled graph.
    """

    passes: PassManager
    options: ScheduleOptions
    rate: _Rate

    def schedule(self, settings: PassSettings) -> Candidate:
        """Schedule the graph with some settings, and rate the result."""
        new_graph = self.passes.schedule_with(settings)
        return Candidate(settings, new_graph, *self.rate(new_graph))


def candidates(graph: Graph, context: PassContext, options: ScheduleOptions) -> list[Candidate]:
    """Schedule a traced graph in every way that the options leave open.

    Each combination of recompute, re-gather and buckets is first scheduled for the least memory. Those that fit are
    then also scheduled in orders that start collectives ahead.
    """

    @functools.cache  # equal results share one rating
    def rate(scheduled: Graph) -> tuple[int, float]:
        return peak_bytes(scheduled), estimate_seconds(scheduled, context.hardware)

    options = options if _all_gathers(graph) else options._replace(prefetch=0)
    scheduler = _Scheduler(PassManager(graph, context), options, rate)
    overlaps = _overlap_settings(options, any(is_reduce_collective(n) for part in graphs_in(graph) for n in part.nodes))
    leanest = _schedule_leanest(scheduler, overlaps[0])
    # reductions in flight take memory, so only schedules that fit without are tried; prefetches fill free memory only
    prefetch_budget = max(min(c.peak_bytes for c in leanest), options.memory_budget or 0)
    limit = max(prefetch_budget, _peak_limit(leanest, options.memory_budget))
    fitting = [c for c in leanest if c.peak_bytes <= limit]
    schedules = leanest + _schedule_overlaps(scheduler, fitting, overlaps[1:], prefetch_budget)
    schedules = _add_carried(scheduler, schedules, limit)
    schedules = _add_early_sends(scheduler, schedules, limit, (leanest[0].pass_settings.recompute, overlaps[-1]))
    return [c for c in schedules if options.prefetch in ("auto", c.pass_settings.prefetch)] or leanest


def _schedule_leanest(scheduler: _Scheduler, overlap: tuple[int | str, int]) -> list[Candidate]:
    """Schedule each combination of recompute, re-gather, buckets and recast in the order of the least memory."""
    prefetch, in_flight = overlap
    tries = _settings_to_try(scheduler.passes, scheduler.options)
    schedules = [scheduler.schedule(x._replace(prefetch=prefetch, in_flight=in_flight)) for x in tries]
    return _add_recast(scheduler, schedules)


def _schedule_overlaps(
    scheduler: _Scheduler,
    schedules: list[Candidate],
    overlaps: Sequence[tuple[int | str, int]],
    prefetch_budget: float,
) -> list[Candidate]:
    """Schedule the same settings in the orders that start collectives ahead, or leave reductions in flight."""
    return [
        scheduler.schedule(
            c.pass_settings._replace(prefetch=prefetch, in_flight=in_flight, prefetch_budget=prefetch_budget)
        )
        for c in schedules
        for prefetch, in_flight in overlaps
    ]


def _add_carried(scheduler: _Scheduler, schedules: list[Candidate], limit: float) -> list[Candidate]:
    """Add the schedules whose reductions stay in flight between iterations; the option may force or forbid them."""
    option = scheduler.options.across_iterations
    if option is False:
        return schedules
    candidates_that_carry = [
        scheduler.schedule(c.pass_settings._replace(across_iterations=True))
        for c in schedules
        if c.pass_settings.in_flight and c.peak_bytes <= limit
    ]
    candidates_that_carry = [c for c in candidates_that_carry if _carries_reductions(c.graph)]
    return candidates_that_carry if candidates_that_carry and option is True else schedules + candidates_that_carry


def _add_early_sends(
    scheduler: _Scheduler, schedules: list[Candidate], limit: float, candidate: tuple[bool, tuple[int | str, int]]
) -> list[Candidate]:
    """Add the schedules of a pipeline that send gradients early; the option may force or forbid them.

    Args:
        scheduler: the scheduler.
        schedules: the schedules that send in the order of the trace.
        limit: the largest peak of a schedule that is tried again.
        candidate: the settings of recompute and of overlap that are tried. The other memory that time can be bought
            with is cheaper, and is spent first.
    """
    option = scheduler.options.send_early
    if option is False or not _may_send_early(scheduler.passes.traced):
        return schedules
    settings = [c.pass_settings for c in schedules if c.peak_bytes <= limit or option is True]
    tries = [x for x in settings if (x.recompute, (x.prefetch, x.in_flight)) == candidate]
    early = [scheduler.schedule(x._replace(send_early=True)) for x in tries]
    return early if option is True else schedules + early


def _add_recast(scheduler: _Scheduler, schedules: list[Candidate]) -> list[Candidate]:
    """Add the schedules in which `recast` saves memory; the option may force or forbid them."""
    passes, options = scheduler.passes, scheduler.options
    if options.recast is False:
        return schedules
    tries = [c.pass_settings._replace(recast=True) for c in schedules]
    recasts = [scheduler.schedule(x) if passes.changed_by(x, "recast") else None for x in tries]
    if options.recast is True:
        return [new or old for old, new in zip(schedules, recasts, strict=True)]
    return schedules + [
        new for old, new in zip(schedules, recasts, strict=True) if new and new.peak_bytes < old.peak_bytes
    ]


def _carries_reductions(graph: Graph) -> bool:
    """Return whether reductions of a loop in the graph stay in flight between iterations."""
    return any(loop.carried_count for n in graph.nodes if (loop := node_loop(n)))


def _may_send_early(graph: Graph) -> bool:
    """Return whether the graph has a pipeline whose schedule does not split backward passes by itself."""
    loops = [loop for n in graph.nodes if (loop := node_loop(n)) and loop.rank_schedule]
    return any(not loop.splits_backward for loop in loops)


def _all_gathers(graph: Graph) -> list[Node]:
    """List the gathers of parameters, also those in loops."""
    return [g for part in graphs_in(graph) for g in parameter_gathers(part)]


def _settings_to_try(passes: PassManager, options: ScheduleOptions) -> list[PassSettings]:
    """List the settings of recompute, re-gather and buckets that the options leave open."""
    graph = passes.traced
    gathers = _all_gathers(graph)
    shared_gathers = [g for part in shared_graphs(graph) for g in parameter_gathers(part)] or gathers
    reuse_bytes = (
        _option_values(options.max_reuse_bytes, [_small_bytes(shared_gathers), math.inf]) if gathers else [math.inf]
    )
    recomputes = _option_values(options.recompute, [False, True])
    (size,) = _option_values(options.bucket_bytes, [_bucket_bytes(graph)])
    tries = [
        PassSettings(recompute=recompute, max_reuse_bytes=reuse, bucket_bytes=size)
        for recompute, reuse in itertools.product(recomputes, reuse_bytes)
    ]
    if len(recomputes) > 1 and not passes.changed_by(tries[-1], "recompute"):
        return [settings for settings in tries if not settings.recompute]  # there is nothing to recompute
    return tries


def _overlap_settings(options: ScheduleOptions, has_reduce: bool) -> list[tuple[int | str, int]]:
    """List the pairs `(prefetch, in_flight)` to try, the one of the least memory first.

    The first pair determines the memory that is free for "fitting" gathers.
    """
    prefetch = [0, FITTING] if options.prefetch in ("auto", FITTING) else [options.prefetch]
    in_flight = _option_values(options.in_flight, [0, 1] if has_reduce else [0])
    return list(itertools.product(prefetch, in_flight))


def _peak_limit(schedules: Sequence[Candidate], budget: float | None) -> float:
    """Return the largest peak that a schedule may have, in bytes."""
    return budget if budget is not None else PEAK_TOLERANCE * min(c.peak_bytes for c in schedules)


def _option_values(option: _T | str, auto: list[_T]) -> list[_T]:
    return auto if isinstance(option, str) else [option]


def choose(schedules: Sequence[Candidate], budget: float | None, name: str) -> int:
    """Return the index of the best candidate.

    With a budget (bytes) it is the fastest candidate that fits; if none fits, the smallest, with a warning. Without a
    budget it is the fastest within 3% of the smallest peak, so that a ZeRO stage saves the memory that it promises.
    """
    smallest, limit = min(c.peak_bytes for c in schedules), _peak_limit(schedules, budget)
    fitting_indices = [i for i, c in enumerate(schedules) if c.peak_bytes <= limit]
    if not fitting_indices:
        warnings.warn(
            f"fzero.jit: {name} needs {smallest:,} bytes at its peak with the smallest of {len(schedules)} schedules, "
            f"{smallest - limit:,.0f} more than memory_budget={budget:,}; this smallest schedule is used. A higher "
            f"stage, more ranks, more micro-batches or smaller units need less memory{trouble_link('out-of-memory')}",
            stacklevel=2,
        )
        fitting_indices = [i for i, c in enumerate(schedules) if c.peak_bytes == smallest]
    return min(fitting_indices, key=lambda i: (schedules[i].seconds, schedules[i].peak_bytes, i))


def _small_bytes(gathers: Sequence[Node]) -> int:
    """Return how many bytes of units may be used between two uses of a gathered one: an eighth of the largest."""
    return max(full_bytes(g) for g in gathers) // 8


def _bucket_bytes(graph: Graph) -> int:
    """Return a bucket size that does not raise the peak: the size of the largest unit, at most a mebibyte."""
    sizes = [full_bytes(n) for part in shared_graphs(graph) for n in part.nodes if is_collective(n)]
    return min(max(sizes, default=0), 1 << 20)
