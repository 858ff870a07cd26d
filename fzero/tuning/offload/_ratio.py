"""Find the smallest ratio of offload whose plan fits a budget."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fzero._arguments import check_int
from fzero._format import format_bytes
from fzero._notice import trouble_link
from fzero._report import Report
from fzero._tracebacks import api_boundary
from fzero.graph import Plan
from fzero.tuning._configured_step import MakeStep, World, check_bytes, plan_at

__all__ = ["OffloadRatio", "RatioTrial", "offload_ratio"]


class RatioTrial(NamedTuple):
    """A ratio of the search, and the numbers of its plan.

    Attributes:
        ratio: the share of the optimizer state that lies on the host.
        device_bytes: peak bytes on the device.
        host_bytes: peak bytes on the host, for this rank.
        down_bytes: bytes that a step copies to the host.
        up_bytes: bytes that a step copies back to the device.
    """

    ratio: float
    device_bytes: int
    host_bytes: int
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True)
class OffloadRatio(Report):
    """The smallest ratio of offload that fits, made by `fzero.tuning.offload_ratio`. Print it.

    Attributes:
        ratio: the ratio. It fits, and `1 / parts` less does not.
        plan: the plan of the step at this ratio.
        memory_budget: the budget of the device, in bytes.
        tried: all ratios that were planned, in ascending order.
    """

    ratio: float
    plan: Plan
    memory_budget: float
    tried: tuple[RatioTrial, ...]

    def __repr__(self) -> str:
        return (
            f"OffloadRatio({self.ratio:g}: {format_bytes(self.plan.peak_bytes)} of {format_bytes(self.memory_budget)})"
        )

    def __str__(self) -> str:
        """Return a table of the ratios that were tried, with their bytes, and which of them fit."""
        rows = [["ratio", "device", "host", "down", "up", ""]]
        for t in self.tried:
            excess_bytes = t.device_bytes - self.memory_budget
            remark = "smallest that fits" if t.ratio == self.ratio else "fits"
            if excess_bytes > 0:
                remark = f"{format_bytes(excess_bytes)} too much"
            rows.append([f"{t.ratio:g}", *[format_bytes(n) for n in t[1:]], remark])
        widths = [max([len(row[i]) for row in rows]) for i in range(5)]
        lines = ["".join([f"{cell:>{w}}  " for cell, w in zip(row, widths, strict=False)]) + row[5] for row in rows]
        head = f"ratio {self.ratio:g} fits {format_bytes(self.memory_budget)} of the device"
        return "\n".join([head, *[line.rstrip() for line in lines]])


@api_boundary
def offload_ratio(
    make_step: MakeStep,
    memory_budget: float,
    *,
    host_budget: float | None = None,
    world_size: World = None,
    parts: int = 1000,
) -> OffloadRatio:
    """Find the smallest ratio of `optim.offload` at which a step fits the device, by its plans.

    The less state lies on the host, the faster a step is, so take the smallest ratio that fits. The peak on the device
    falls almost linearly with the ratio. So the search starts from the plans at 0 and 1, and needs two to six more.
    Nothing runs, and with meta tensors nothing is allocated.

    Args:
        make_step: a function from a ratio to `(step, *args)`, the arguments of `fzero.plan`: a step, jitted or not,
            whose optimizer offloads that ratio, and its arguments, real or meta. It may return a `fzero.graph.Plan`.
        memory_budget: the bytes on the device that a rank may hold at its peak, arguments included.
        host_budget: the bytes on the host that a rank may hold: the machine's memory over its ranks.
        world_size: as in `fzero.plan`: the number of ranks to plan for, or the size of each axis.
        parts: ratios are multiples of `1 / parts`.

    Returns:
        An `OffloadRatio`: the ratio, its plan, and all ratios that were tried.

    Raises:
        TypeError: if `make_step` is no such function.
        ValueError: if a budget is not a positive number of bytes, or `parts` is not an int of at least 1. Also if no
            ratio fits the device, or the smallest that fits does not fit the host. The message says what would help.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> mesh = fzero.mesh(dp=2)
        >>> def make_step(ratio):
        ...     opt = optim.offload(optim.adam(1e-3), ratio)
        ...
        ...     def train_step(params, opt_state, x):
        ...         loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        ...         updates, opt_state = opt.update(grads, opt_state, params)
        ...         return optim.apply_updates(params, updates), opt_state, loss
        ...
        ...     step = fzero.shard(train_step, stage=2, mesh=mesh)
        ...     with torch.device("meta"):
        ...         params, batch = {"w": torch.zeros(1024, 1024)}, torch.zeros(16, 1024)
        ...     return step, *step.init(params, opt), mesh.split(batch)
        >>> print(fzero.tuning.offload_ratio(make_step, memory_budget=14.2e6, parts=100))
        ratio 0.63 fits 14.2 MB of the device
        ratio   device    host    down      up
            0  16.8 MB     0 B     0 B     0 B  2.6 MB too much
         0.62  14.2 MB  3.9 MB  1.3 MB  1.3 MB  9.0 kB too much
         0.63  14.2 MB  4.0 MB  1.3 MB  1.3 MB  smallest that fits
            1  12.6 MB  6.3 MB  2.1 MB  2.1 MB  fits
    """
    budget = check_bytes("memory_budget", memory_budget)
    room = None if host_budget is None else check_bytes("host_budget", host_budget)
    check_int("parts", parts)
    plans: dict[int, Plan] = {}

    def peak(k: int) -> int:
        plans[k] = plan_at(make_step, k / parts, world_size)
        return plans[k].peak_bytes

    k = _first_fit(peak, budget, parts)
    if k is None:
        raise ValueError(_does_not_fit(plans[0], plans[parts], budget))
    result = OffloadRatio(
        k / parts, plans[k], budget, tuple([_summarize_trial(i / parts, plans[i]) for i in sorted(plans)])
    )
    if room is not None and (host := plans[k].peak_of("host")) > room:
        raise ValueError(
            f"host_budget={host_budget:,}: at the smallest ratio that fits the device, {result.ratio:g}, the host "
            f"holds {host:,} bytes for each rank, {host - room:,.0f} more than the budget. More ranks or a larger "
            "memory_budget reduce the bytes on the host"
        )
    return result


def _first_fit(peak: Callable[[int], int], budget: float, parts: int) -> int | None:
    """Return the first of 0 to `parts` at which a falling function is at most `budget`; None if there is none.

    Each probe is where the line between the nearest known values meets the budget. Later probes keep a growing distance
    from these values. So a linear function takes two probes, and any other at most twice as many as bisection.
    """
    if (above := peak(0)) <= budget:
        return 0
    if (below := peak(parts)) > budget:
        return None
    low, high, probes = 0, parts, 0
    while high - low > 1:
        share = (above - budget) / (above - below)
        guess = low + math.ceil(share * (high - low))
        min_step = min(max(1, 2**probes // 2), (high - low) // 2)
        probes += 1
        k = min(max(guess, low + min_step), high - min_step)
        if (value := peak(k)) <= budget:
            high, below = k, value
        else:
            low, above = k, value
    return high


def _summarize_trial(ratio: float, plan: Plan) -> RatioTrial:
    to_host_bytes, to_device_bytes = (
        sum([t.bytes * t.times for t in plan.transfers if t.kind == kind]) for kind in ("to_host", "to_device")
    )
    return RatioTrial(
        ratio=ratio,
        device_bytes=plan.peak_of("device"),
        host_bytes=plan.peak_of("host"),
        down_bytes=to_host_bytes,
        up_bytes=to_device_bytes,
    )


def _does_not_fit(none: Plan, all_: Plan, budget: float) -> str:
    """Explain by how much a step does not fit, what it holds at its peak, and what would need less memory."""
    by_kind: Counter[str] = Counter()
    for r in all_.alive(all_.peak_at):
        by_kind[r.kind] += r.bytes if r.space == "device" else 0
    parts = ", ".join([f"{format_bytes(n)} of {kind}" for kind, n in by_kind.most_common(3) if n])
    peak = all_.peak_bytes
    if none.peak_bytes == peak:
        remedy = "This is the peak at a ratio of 0, too: does make_step pass its argument to optim.offload?"
    else:
        remedy = "A higher stage, fzero.remat, more ranks, more micro-batches or smaller units need less memory"
    return (
        f"memory_budget={budget:,.0f}: with all of the state on the host the device still holds {peak:,} bytes at its "
        f"peak, {peak - budget:,.0f} more than the budget: {parts}. {remedy}{trouble_link('out-of-memory')}"
    )
