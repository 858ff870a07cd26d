"""Summarize one rank's plan of a configuration in a few numbers."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fzero.graph import KINDS, PEAK_TOLERANCE, Plan, PlanSettings
from fzero.tuning._search_space import Configuration

__all__ = ["KindBytes", "OperationKey", "PlanSummary", "ScheduleCost", "TableRow", "make_row", "row_from", "summarize"]


# Each number of a row is linear in the depth, so it is extrapolated.
_NEAR_PEAK = 0.75  # share of the peak from which an operation of few blocks may be the peak of many

# an operation: its pass, its source line and its target, and "first", "last", "peak" or a number from either end, to
# name one of the operations alike
OperationKey = tuple[str | int, ...]
KindBytes = Mapping[str, float]  # bytes by kind


class ScheduleCost(NamedTuple):
    """The peak and the time of a step in one schedule."""

    peak_bytes: float
    seconds: float


@dataclass(frozen=True)
class PlanSummary:
    """The numbers of a plan that are linear in the depth.

    Attributes:
        device_bytes: bytes on the device by kind, at each of the compared operations.
        traffic_bytes: bytes of collectives and messages, by axis.
        host_bytes: peak bytes on the host.
        flops: floating-point operations of the step.
        schedules: the schedules, by their settings. The chosen one is the first.
        limits: seconds of the step by what bounds them, as in `Plan.limits`.
    """

    device_bytes: Mapping[OperationKey, KindBytes]
    traffic_bytes: KindBytes
    host_bytes: float
    flops: float
    schedules: Mapping[tuple[tuple[str, Any], ...], ScheduleCost]
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """The settings of the chosen schedule."""
        return next(iter(self.schedules))

    @property
    def fastest(self) -> tuple[tuple[str, Any], ...]:
        """The settings that `fzero.jit` would choose: the fastest whose peak is within 3% of the smallest."""
        limit = PEAK_TOLERANCE * min([cost.peak_bytes for cost in self.schedules.values()])
        fitting = {s: cost for s, cost in self.schedules.items() if cost.peak_bytes <= limit}
        return min(fitting, key=lambda s: (fitting[s].seconds, fitting[s].peak_bytes))

    @property
    def at_peak(self) -> KindBytes:
        """Bytes on the device by kind, at the operation where most bytes are alive."""
        return max(self.device_bytes.values(), key=lambda by_kind: sum(by_kind.values()))


@dataclass(frozen=True)
class TableRow:
    """The memory and the time of a configuration on one rank, by its plan. In a pipeline it is the fullest rank.

    Attributes:
        config: the configuration.
        device_bytes: bytes on the device at the peak, by kind: "parameters", "optimizer state", "activations", ...
        traffic_bytes: bytes that collectives and messages of a pipeline move in a step, by axis.
        seconds: the time of a step on the slowest rank, by the cost model.
        host_bytes: peak bytes on the host.
        flops: floating-point operations of a step on this rank.
        in_full: whether the step was planned as it is, and not extrapolated from models of fewer blocks.
        settings: the settings of the schedule that fzero.jit chooses, as in `Plan.settings`.
        rank: the rank along the pipeline.
        limits: the shares of the seconds by what bounds them: "products", "memory", "launches", "wire", ..., as in
            `Plan.limits`. They add up to 1.
    """

    config: Configuration
    device_bytes: KindBytes
    traffic_bytes: KindBytes
    seconds: float
    host_bytes: float
    flops: float
    in_full: bool
    settings: PlanSettings
    rank: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> float:
        """The most bytes that are alive on the device at any time."""
        return sum(self.device_bytes.values())

    def record(self) -> dict[str, Any]:
        """Return the row as values for JSON, with None for infinity. `row_from` is the inverse."""
        settings = {k: None if v == math.inf else v for k, v in self.settings.items()}
        return {**asdict(self), "settings": settings}

    @property
    def min_peak_bytes(self) -> float:
        """A lower bound of the peak, also with a larger micro-batch, a lower stage, or less remat or offload."""
        return sum([self.device_bytes.get(kind, 0.0) for kind in ("parameters", "optimizer state", "activations")])


def summarize(plan: Plan) -> PlanSummary:
    """Return the numbers of a plan that are linear in the depth."""
    by_kind = {kind: live for kind in KINDS if any(live := plan.live_of(kind))}
    device_bytes = {
        key: {kind: live[i] for kind, live in by_kind.items()} for key, i in _compared_operations(plan).items()
    }
    traffic: Counter[str] = Counter()
    for c in plan.collectives:
        traffic[c.axis] += c.bytes * c.times
    for m in plan.messages:
        traffic[m.axis] += m.bytes * m.times
    schedules = {tuple(plan.settings.items()): ScheduleCost(plan.peak_bytes, plan.seconds)}
    schedules |= {tuple(r.settings.items()): ScheduleCost(r.peak_bytes, r.seconds) for r in plan.rejected}
    return PlanSummary(
        device_bytes=device_bytes,
        traffic_bytes=dict(traffic),
        host_bytes=plan.peak_of("host"),
        flops=plan.flops,
        schedules=schedules,
        limits=plan.limits,
    )


def _compared_operations(plan: Plan) -> dict[OperationKey, int]:
    """Find operations whose live bytes are linear in the depth: of those alike the first, the last and the fullest.

    The peak need not be linear, since it may move to another operation with more blocks: to one of those alike, too.
    So each operation near the peak is found as well, by its number from the nearer end of those alike.
    """
    groups: defaultdict[OperationKey, list[int]] = defaultdict(list)
    for i, o in enumerate(plan.operations):
        groups[o.phase, o.line, o.target].append(i)
    near_peak = _NEAR_PEAK * plan.peak_bytes
    indices: dict[OperationKey, int] = {}
    for key, group in groups.items():
        indices[*key, "first"], indices[*key, "last"] = group[0], group[-1]
        indices[*key, "peak"] = max(group, key=lambda i: plan.live[i])
        for n, i in enumerate(group):
            if plan.live[i] >= near_peak:
                indices[*key, n if n < len(group) / 2 else n - len(group)] = i
    return indices


def make_row(config: Configuration, summaries: Mapping[int, PlanSummary], in_full: bool) -> TableRow:
    """Make a row from the summaries of some ranks: the memory of the fullest rank, and the seconds of the slowest."""
    rank = max(summaries, key=lambda r: sum(summaries[r].at_peak.values()))
    summary = summaries[rank]
    device_bytes = {kind: n for kind, n in summary.at_peak.items() if n}
    slowest = max(summaries.values(), key=lambda s: s.schedules[s.settings].seconds)
    total = sum(slowest.limits.values()) or 1.0
    settings = dict(summary.settings)
    return TableRow(
        config=config,
        device_bytes=device_bytes,
        traffic_bytes=summary.traffic_bytes,
        seconds=slowest.schedules[slowest.settings].seconds,
        host_bytes=summary.host_bytes,
        flops=summary.flops,
        in_full=in_full,
        settings=settings,
        rank=rank,
        limits={limit: seconds / total for limit, seconds in slowest.limits.items()},
    )


def row_from(record: Mapping[str, Any]) -> TableRow:
    """Read a row that `TableRow.record` made.

    Raises:
        TypeError: if the record has unknown fields, or lacks some.
        KeyError: if it lacks the configuration or the settings.
    """
    settings = {k: math.inf if v is None else v for k, v in record["settings"].items()}
    return TableRow(**{**record, "config": Configuration(**record["config"]), "settings": settings})
