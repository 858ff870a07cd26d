"""Hyperparameters: numbers that are checked when a pair is made, or 0-d tensors that may change as training goes."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

__all__ = ["Number", "at_least_float32", "fraction", "is_zero", "nonnegative", "positive"]

Number = float | torch.Tensor  # a 0-d tensor is one that `inject_hyperparams` keeps in the state


def nonnegative(**values: object) -> None:
    """Check that hyperparameters, given by name, are finite numbers >= 0; tensors are not looked into."""
    _check(values, "a number >= 0", lambda v: 0 <= v < math.inf)


def positive(**values: object) -> None:
    """Check that hyperparameters are positive numbers; infinity is one."""
    _check(values, "a positive number", lambda v: v > 0)


def fraction(**values: object) -> None:
    """Check that hyperparameters are numbers in [0, 1)."""
    _check(values, "a number in [0, 1)", lambda v: 0 <= v < 1)


def _check(values: Mapping[str, object], expected: str, holds: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            continue  # to look at its value would stop a trace
        if not (isinstance(value, Real) and holds(value)):
            hint = "; for a schedule see optim.inject_hyperparams" if callable(value) else ""
            raise ValueError(f"{name}={value!r}: expected {expected}{hint}")


def is_zero(value: Number) -> bool:
    """Return whether a hyperparameter is the number 0; a tensor never is, since it may change."""
    return not isinstance(value, torch.Tensor) and value == 0


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen a half-precision tensor to float32: squares overflow in it, and an eps of 1e-8 is 0."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
