"""Schedules: functions from the number of updates to a learning rate or another hyperparameter."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

import torch

from fzero._arguments import check_callable
from fzero._tracebacks import api_boundary

__all__ = [
    "Schedule",
    "constant",
    "exponential_decay",
    "join_schedules",
    "linear",
    "piecewise_constant",
    "warmup_cosine",
    "warmup_linear",
]

Schedule = Callable[[torch.Tensor], torch.Tensor]
"""A function of the number of updates done, an integer tensor `[]`, to a value such as a learning rate, `[]`."""


@api_boundary
def constant(value: float) -> Schedule:
    """Return `value` at every update.

    Example:
        >>> constant(0.1)(torch.tensor(7))
        tensor(0.1000, dtype=torch.float64)
    """
    _check_numbers(value=value)
    return _name_schedule(lambda count: torch.full((), value, dtype=torch.float64, device=count.device))


@api_boundary
def linear(start: float, end: float, steps: int) -> Schedule:
    """Go from `start` to `end` along a line, and stay there: `optax.linear_schedule`.

    With `start=0` it is a warm-up that stays at its peak.

    Args:
        start: the value at update 0.
        end: the value at update `steps`, and from then on.
        steps: the number of updates between the two values.

    Raises:
        ValueError: if `steps` is not positive.

    Example:
        >>> schedule = linear(1.0, 0.0, steps=4)
        >>> [schedule(torch.tensor(t)).item() for t in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """
    _check_numbers(start=start, end=end)
    _check_steps(steps=steps)
    return _name_schedule(lambda count: start + (end - start) * (count.to(torch.float64) / steps).clamp(0, 1))


@api_boundary
def warmup_linear(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Rise linearly from 0 to `peak`, then fall linearly to `end`: BERT's schedule (arXiv:1810.04805).

    Args:
        peak: the highest rate, reached at update `warmup_steps`.
        warmup_steps: the number of updates of the rise.
        total_steps: the number of updates of rise and fall; the rate is `end` from then on.
        end: the last rate.

    Raises:
        ValueError: if not 0 <= warmup_steps < total_steps.

    Example:
        >>> schedule = warmup_linear(1.0, warmup_steps=10, total_steps=30)
        >>> [schedule(torch.tensor(t)).item() for t in (0, 5, 10, 20, 30, 99)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return _warm_up_to(peak, warmup_steps, total_steps, lambda progress: peak + (end - peak) * progress)


@api_boundary
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Rise linearly from 0 to `peak`, then fall to `end` along half a cosine (SGDR, arXiv:1608.03983, one cycle).

    Args:
        peak: the highest rate, reached at update `warmup_steps`.
        warmup_steps: the number of updates of the rise.
        total_steps: the number of updates of rise and fall; the rate is `end` from then on.
        end: the last rate.

    Raises:
        ValueError: if not 0 <= warmup_steps < total_steps.

    Example:
        >>> schedule = warmup_cosine(1.0, warmup_steps=10, total_steps=30)
        >>> [round(schedule(torch.tensor(t)).item(), 3) for t in (0, 5, 10, 20, 30, 99)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return _warm_up_to(
        peak,
        warmup_steps,
        total_steps,
        lambda progress: end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * progress)),
    )


def _warm_up_to(peak: float, warmup_steps: int, total_steps: int, fall: Schedule) -> Schedule:
    """Rise linearly to `peak`, then follow `fall`, which maps progress from 0 to 1 to a rate."""
    _check_numbers(peak=peak, warmup_steps=warmup_steps, total_steps=total_steps)
    if 0 < warmup_steps < 1:
        order = "the order of the arguments is peak, warmup_steps, total_steps"
        raise ValueError(f"warmup_steps={warmup_steps!r}: expected a number of steps; {order}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"expected 0 <= warmup_steps < total_steps, given {warmup_steps} and {total_steps}")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        t = count.to(torch.float64)
        rise = peak * t / max(warmup_steps, 1)
        progress = ((t - warmup_steps) / (total_steps - warmup_steps)).clamp(0, 1)
        return torch.where(t < warmup_steps, rise, fall(progress))

    return _name_schedule(schedule)


@api_boundary
def exponential_decay(
    start: float, steps: int, decay_rate: float, staircase: bool = False, end: float | None = None
) -> Schedule:
    """Multiply `start` by `decay_rate` every `steps` updates, smoothly or in stairs: `optax.exponential_decay`.

    Args:
        start: the value at update 0.
        steps: the number of updates per factor of `decay_rate`.
        decay_rate: the factor.
        staircase: whether the value jumps every `steps` updates and is constant in between.
        end: a bound of the value: a lower bound if `decay_rate` < 1, else an upper bound. By default there is none.

    Raises:
        ValueError: if `steps` or `decay_rate` is not positive.

    Example:
        >>> schedule = exponential_decay(1.0, steps=10, decay_rate=0.25)
        >>> [schedule(torch.tensor(t)).item() for t in (0, 5, 10)]
        [1.0, 0.5, 0.25]
    """
    _check_steps(steps=steps)
    if not decay_rate > 0:
        raise ValueError(f"decay_rate={decay_rate!r}: expected a positive number")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        power = count.to(torch.float64) / steps
        value = start * decay_rate ** (power.floor() if staircase else power)
        if end is None:
            return value
        return value.clamp(min=end) if decay_rate < 1 else value.clamp(max=end)

    return _name_schedule(schedule)


@api_boundary
def piecewise_constant(start: float, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """Multiply the value by a factor at each boundary: `optax.piecewise_constant_schedule`.

    Args:
        start: the value at update 0.
        boundaries_and_scales: number of updates -> factor that multiplies the value from then on.

    Raises:
        ValueError: if a boundary is negative.

    Example:
        >>> schedule = piecewise_constant(1.0, {100: 0.5, 200: 0.5})
        >>> [schedule(torch.tensor(t)).item() for t in (0, 99, 100, 200)]
        [1.0, 1.0, 0.5, 0.25]
    """
    if any(boundary < 0 for boundary in boundaries_and_scales):
        raise ValueError(f"boundaries_and_scales={boundaries_and_scales}: expected boundaries >= 0")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        value = torch.full((), start, dtype=torch.float64, device=count.device)
        for boundary, factor in boundaries_and_scales.items():
            value = torch.where(count < boundary, value, value * factor)
        return value

    return _name_schedule(schedule)


@api_boundary
def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Follow one schedule after another; each counts from its own start: `optax.join_schedules`.

    Args:
        schedules: the parts.
        boundaries: the numbers of updates at which each schedule but the first begins.

    Raises:
        ValueError: if the boundaries do not increase, or are not one fewer than the schedules.

    Example:
        >>> parts = [linear(0.0, 1.0, 10), constant(1.0), linear(1.0, 0.0, 20)]  # warm up, stay, cool down
        >>> schedule = join_schedules(parts, [10, 80])
        >>> [schedule(torch.tensor(t)).item() for t in (0, 5, 50, 90, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    for i, part in enumerate(schedules):
        check_callable(f"schedule {i}", part, "a function of the number of updates, such as optim.constant(0.1)")
    if len(boundaries) != len(schedules) - 1 or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"boundaries={list(boundaries)}: expected {len(schedules) - 1} increasing numbers, "
            f"one for each of {len(schedules)} schedules but the first"
        )

    def schedule(count: torch.Tensor) -> torch.Tensor:
        value = schedules[0](count)
        for boundary, part in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(count < boundary, value, part(count - boundary))
        return value

    return _name_schedule(schedule)


def _name_schedule(schedule: Schedule) -> Schedule:
    """Give a schedule a name for its errors, such as that of a call with two arguments."""
    schedule.__name__ = schedule.__qualname__ = "schedule"
    return schedule


def _check_numbers(**values: object) -> None:
    """Check that the arguments of a schedule are numbers, which torch would else refuse at the first update."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real | torch.Tensor):
            raise ValueError(f"{name}={value!r}: expected a number")


def _check_steps(**steps: float) -> None:
    _check_numbers(**steps)
    for name, value in steps.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r}: expected a positive number of updates")
