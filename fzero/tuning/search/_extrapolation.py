"""Extrapolate a model of many blocks from models of few blocks, and check that the numbers lie on lines."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fzero.tuning._row import KindBytes, OperationKey, PlanSummary, ScheduleCost
from fzero.tuning._search_space import EVERY_SECOND, Configuration

__all__ = ["choose_depths", "extrapolate", "extrapolate_line"]

# The numbers of blocks that are planned. With fewer, not all prefetches would have begun; a stage of a pipeline gathers
# all its blocks before the first. Where every second block may be of another kind, an odd depth needs odd numbers, and
# an even depth even ones.
_DEPTHS_BY_PARITY = {1: (3, 5, 7, 9, 11), 0: (4, 6, 8, 10, 12)}
_DEPTHS_IF_UNIFORM = (4, 5, 6, 7, 8)
_DEPTHS_OF_STAGE = (2, 3, 4, 5, 6, 7, 8)


def choose_depths(config: Configuration, is_uniform: bool = False) -> tuple[int, ...]:
    """Return numbers of blocks from which to extrapolate a configuration, in the order in which they are planned.

    Each three consecutive depths make one check of the line. The depths planned so far never sum to more blocks than
    the model has, since planning that in full is no more work. In a pipeline all leave the same remainder as the depth
    when they are divided over the stages.

    Args:
        config: the configuration.
        is_uniform: whether all blocks are alike, and not only every second one.
    """
    if config.depth is None:
        return ()
    stages = config.pp * config.pipeline_stages if config.pp > 1 else 1
    blocks_per_stage, remaining_blocks = divmod(config.depth, stages)
    uniform = _DEPTHS_OF_STAGE if config.pp > 1 else _DEPTHS_IF_UNIFORM
    blocks = uniform if is_uniform and config.remat != EVERY_SECOND else _DEPTHS_BY_PARITY[blocks_per_stage % 2]
    fewer = [n for i, n in enumerate(blocks) if sum(blocks[: i + 1]) <= blocks_per_stage]
    return tuple([n * stages + remaining_blocks for n in fewer]) if len(fewer) >= 3 else ()


def extrapolate(shallow: tuple[int, PlanSummary], deep: tuple[int, PlanSummary], depth: int) -> PlanSummary:
    """Extrapolate the summaries of two models linearly to a model of more blocks.

    Args:
        shallow: a number of blocks, and its summary.
        deep: a larger number of blocks, and its summary.
        depth: the number of blocks to extrapolate to.
    """
    (few_blocks, low), (many_blocks, high) = shallow, deep

    def at(a: float, b: float) -> float:
        return a + (b - a) * (depth - few_blocks) / (many_blocks - few_blocks)

    def each(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
        return {key: at(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}

    device_bytes = {
        key: each(low.device_bytes[key], high.device_bytes[key]) for key in high.device_bytes if key in low.device_bytes
    }
    traffic_bytes, host_bytes = each(low.traffic_bytes, high.traffic_bytes), at(low.host_bytes, high.host_bytes)
    schedules = {
        s: ScheduleCost(*map(at, low.schedules[s], high.schedules[s])) for s in high.schedules if s in low.schedules
    }
    limits = {limit: max(seconds, 0.0) for limit, seconds in each(low.limits, high.limits).items()}
    return PlanSummary(
        device_bytes=device_bytes,
        traffic_bytes=traffic_bytes,
        host_bytes=host_bytes,
        flops=at(low.flops, high.flops),
        schedules=schedules,
        limits=limits,
    )


# The check. An operation is found by its pass, its line and its target, so it may be another one in a model of other
# depth: the last all_gather of four blocks lay before the logits, and that of five blocks within them. A line through
# these two would add logits for each block.
_TOLERANCE = 1e-3  # how far a number may lie off its line, as a share of the peak, or of the number itself


def extrapolate_line(summaries: Mapping[int, PlanSummary], depth: int) -> PlanSummary | None:
    """Extrapolate the first and the last of three summaries, with the middle one as a check.

    An operation that lies off its line is left out if it cannot be the peak: its bytes would have to grow faster with
    each block than they ever did. One that is known only by its number is left out in any case. In models of other
    depth it may be another one, and the fullest of those alike is compared, too.

    Args:
        summaries: the summaries of three models in one schedule, by their number of blocks.
        depth: the number of blocks to extrapolate to.

    Returns:
        The summary; None if the numbers of the middle model do not lie on the line.
    """
    (few_blocks, low), (middle_blocks, mid), (many_blocks, high) = summaries.items()
    keys = {*low.device_bytes} & {*mid.device_bytes} & {*high.device_bytes}
    if not (mid.settings == low.settings == high.settings) or not all(_peak_is_at(keys, x) for x in summaries.values()):
        return None
    line = extrapolate((few_blocks, low), (many_blocks, high), middle_blocks)
    if not all(_are_near(a, b) for a, b in _compared_numbers(line, mid)):
        return None
    slack = _TOLERANCE * _total_bytes(mid.at_peak)
    off = {key for key in keys if _largest_gap(line.device_bytes[key], mid.device_bytes[key]) > slack}
    result = extrapolate((few_blocks, low), (many_blocks, high), depth)
    device_bytes = {key: result.device_bytes[key] for key in keys - off}
    peak = max([_total_bytes(by_kind) for by_kind in device_bytes.values()], default=0.0)
    certain = {key for key in off if not isinstance(key[-1], int)}
    if any(
        _largest_at({n: _total_bytes(x.device_bytes[key]) for n, x in summaries.items()}, depth) > peak
        for key in certain
    ):
        return None
    return replace(result, device_bytes=device_bytes)


def _peak_is_at(keys: Collection[OperationKey], summary: PlanSummary) -> bool:
    """Return whether some of these operations has as many bytes alive as the peak."""
    return any(_total_bytes(summary.device_bytes[key]) >= _total_bytes(summary.at_peak) for key in keys)


def _compared_numbers(a: PlanSummary, b: PlanSummary) -> list[tuple[float, float]]:
    """Pair the numbers of two summaries, but the bytes of operations and the schedules that were not chosen."""
    pairs = [*_value_pairs(a.traffic_bytes, b.traffic_bytes), (a.host_bytes, b.host_bytes), (a.flops, b.flops)]
    return [*pairs, (a.schedules[a.settings].seconds, b.schedules[a.settings].seconds)]


def _value_pairs(a: Mapping[Any, float], b: Mapping[Any, float]) -> list[tuple[float, float]]:
    return [(a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}]


def _are_near(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))


def _largest_gap(a: KindBytes, b: KindBytes) -> float:
    return max([abs(x - y) for x, y in _value_pairs(a, b)], default=0.0)


def _largest_at(numbers: Mapping[int, float], depth: int) -> float:
    """Return a number at some depth, if it went on to grow as fast as it ever did."""
    growth = max([(b - a) / (m - n) for (n, a), (m, b) in pairwise(numbers.items())])
    last, value = [*numbers.items()][-1]
    return value + growth * (depth - last)


def _total_bytes(by_kind: KindBytes) -> float:
    return sum(by_kind.values())
