"""A learning rate is a number or a schedule."""

import torch

from fzero.optim._hyper import Number, nonnegative
from fzero.optim.schedules import Schedule

__all__ = ["check_rate", "rate_at"]


def rate_at(rate: Number | Schedule, count: torch.Tensor) -> Number:
    """Return a rate, or a schedule's rate after `count` updates."""
    return rate(count) if callable(rate) else rate


def check_rate(learning_rate: Number | Schedule) -> None:
    """Check that a learning rate is a number >= 0 or a schedule.

    Raises:
        ValueError: if it is not.
    """
    if not callable(learning_rate):
        nonnegative(learning_rate=learning_rate)
