"""Learning-rate schedules: functions from the number of updates done to a rate."""

import math
from collections.abc import Callable

import torch

__all__ = ["Schedule", "constant", "rate_at", "warmup_cosine"]

Schedule = Callable[[torch.Tensor], torch.Tensor]


def constant(value: float) -> Schedule:
    """Return `value` at every update.

    Example:
        >>> constant(0.1)(torch.tensor(7))
        tensor(0.1000, dtype=torch.float64)
    """
    return lambda count: torch.full((), value, dtype=torch.float64, device=count.device)


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Rise linearly from 0 to `peak`, then fall to `end` along half a cosine (SGDR, arXiv:1608.03983, one cycle).

    Args:
        peak: the highest rate, reached at update `warmup_steps`.
        warmup_steps: updates of the rise.
        total_steps: updates of rise and fall; the rate is `end` from then on.
        end: the last rate.

    Raises:
        ValueError: if not 0 <= warmup_steps < total_steps.

    Example:
        >>> schedule = warmup_cosine(1.0, warmup_steps=10, total_steps=30)
        >>> [round(schedule(torch.tensor(t)).item(), 3) for t in (0, 5, 10, 20, 30, 99)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"expected 0 <= warmup_steps < total_steps, given {warmup_steps} and {total_steps}")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        t = count.to(torch.float64)
        rise = peak * t / max(warmup_steps, 1)
        progress = ((t - warmup_steps) / (total_steps - warmup_steps)).clamp(0, 1)
        fall = end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * progress))
        return torch.where(t < warmup_steps, rise, fall)

    return schedule


def rate_at(rate: float | Schedule, count: torch.Tensor) -> float | torch.Tensor:
    """Return a rate, or a schedule's rate after `count` updates."""
    return rate(count) if callable(rate) else rate
