"""Hyperparameters: numbers that are checked when an optimizer is made, or 0-d tensors that change during training."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from fzero.optim._schedules import Schedule

__all__ = [
    "Scalar",
    "check_fraction",
    "check_nonnegative",
    "check_number",
    "check_positive",
    "check_rate",
    "is_zero",
    "lerp",
    "rate_at",
]


Scalar = float | torch.Tensor  # `inject_hyperparams` keeps the 0-d tensors in the state


def check_number(**values: object) -> None:
    """Check that hyperparameters, given by name, are finite numbers. The values of tensors are not checked."""
    _check_numbers(values, "a number", lambda v: -math.inf < v < math.inf)


def check_nonnegative(**values: object) -> None:
    """Check that hyperparameters, given by name, are finite numbers >= 0. The values of tensors are not checked."""
    _check_numbers(values, "a number >= 0", lambda v: 0 <= v < math.inf)


def check_positive(**values: object) -> None:
    """Check that hyperparameters are positive numbers; infinity is allowed."""
    _check_numbers(values, "a positive number", lambda v: v > 0)


def check_fraction(**values: object) -> None:
    """Check that hyperparameters are numbers in [0, 1)."""
    _check_numbers(values, "a number in [0, 1)", lambda v: 0 <= v < 1)


def _check_numbers(values: Mapping[str, object], expected: str, holds: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            continue  # reading its value would break a trace
        if isinstance(value, bool) or not (isinstance(value, Real) and holds(value)):
            hint = "; for a schedule see optim.inject_hyperparams" if callable(value) else ""
            hint = f"; a string is not a number: float({value!r})" if isinstance(value, str) else hint
            hint = "; give b1 and b2 one by one, b1=0.9, b2=0.999" if isinstance(value, tuple | list) else hint
            raise ValueError(f"{name}={value!r}: expected {expected}{hint}")


def is_zero(value: Scalar) -> bool:
    """Return whether a hyperparameter is the number 0; False for a tensor, since its value may change."""
    return not isinstance(value, torch.Tensor) and value == 0


def rate_at(rate: Scalar | Schedule, count: torch.Tensor) -> Scalar:
    """Return the rate, or the value of a schedule after `count` updates."""
    return rate(count) if callable(rate) else rate


# torch's schedulers, and the names that transformers and DeepSpeed have for theirs -> the schedule
_COSINE, _LINEAR = "optim.warmup_cosine(peak, warmup_steps, total_steps)", "optim.linear(start, end, steps)"
_FALL = "optim.warmup_linear(peak, warmup_steps, total_steps)"
_SCHEDULES = {
    "CosineAnnealingLR": "optim.warmup_cosine(peak, 0, total_steps)",
    "CosineAnnealingWarmRestarts": "optim.join_schedules of several optim.warmup_cosine(peak, 0, total_steps)",
    "OneCycleLR": _COSINE,
    "WarmupCosineLR": _COSINE,
    "cosine": _COSINE,
    "LinearLR": _LINEAR,
    "WarmupLR": _LINEAR,
    "constant_with_warmup": _LINEAR,
    "WarmupDecayLR": _FALL,
    "linear": _FALL,
    "ConstantLR": "optim.constant(value), or a number",
    "constant": "optim.constant(value), or a number",
    "ExponentialLR": "optim.exponential_decay(start, steps, decay_rate)",
    "StepLR": "optim.exponential_decay(start, steps, decay_rate, staircase=True)",
    "MultiStepLR": "optim.piecewise_constant(start, {steps: scale})",
    "SequentialLR": "optim.join_schedules(schedules, boundaries)",
    "ReduceLROnPlateau": "optim.inject_hyperparams, by which your loop sets the rate",
}


def check_rate(learning_rate: Scalar | Schedule) -> None:
    """Check that a learning rate is a number >= 0 or a schedule.

    Raises:
        ValueError: if it is neither, such as a scheduler of torch, or its name. The message names the schedule.
    """
    kind = learning_rate if isinstance(learning_rate, type) else type(learning_rate)
    expected = "expected a number >= 0, or a schedule: a function from the number of updates to a rate, such as"
    if isinstance(learning_rate, torch.optim.Optimizer) or issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        schedule = _SCHEDULES.get(kind.__name__, _COSINE)
        raise ValueError(
            f"learning_rate is a {kind.__module__}.{kind.__name__}, which writes rates into an optimizer of torch: "
            f"{expected} {schedule}"
        )
    if isinstance(learning_rate, str) and learning_rate in _SCHEDULES:
        raise ValueError(f"learning_rate={learning_rate!r}: {expected} {_SCHEDULES[learning_rate]}")
    if not callable(learning_rate):
        check_nonnegative(learning_rate=learning_rate)


def lerp(x: torch.Tensor, y: torch.Tensor, weight: Scalar) -> torch.Tensor:
    """Interpolate from `x` to `y` by a weight, in the same operations as torch.optim."""
    if isinstance(weight, torch.Tensor):
        return (x + weight * (y - x)).to(x.dtype)
    return torch.lerp(x, y, weight)
