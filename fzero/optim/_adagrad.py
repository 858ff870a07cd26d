"""Adagrad."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero.optim._base import (
    Number,
    Optimizer,
    Params,
    Updates,
    at_least_float32,
    check_rate,
    nonnegative,
    rate_at,
    torch_hints,
)
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = ["AdagradState", "adagrad"]


class AdagradState(NamedTuple):
    """The number of updates (int64, 0-d), and the sums of squared gradients, a tree like the parameters."""

    count: torch.Tensor
    sum_of_squares: Tree


@torch_hints
def adagrad(
    learning_rate: Number | Schedule, initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> Optimizer:
    """Divide gradients by the root of the sum of all their squares (Duchi et al., JMLR 12, 2011).

    The numbers are `torch.optim.Adagrad`'s; `optax.adagrad` adds eps inside the root.

    Args:
        learning_rate: a number, or a schedule.
        initial_accumulator_value: the start of the sums of squares.
        eps: added to the root.

    Returns:
        A pair; its state has one number per element, of the parameter's dtype.

    Raises:
        ValueError: if a hyperparameter is negative.

    Example:
        >>> opt = adagrad(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    check_rate(learning_rate)
    nonnegative(initial_accumulator_value=initial_accumulator_value, eps=eps)

    def init(params: Params) -> AdagradState:
        sums = tree.map(lambda p: torch.zeros_like(p) + initial_accumulator_value, params)
        return AdagradState(torch.zeros((), dtype=torch.int64), tree.map(lambda s, p: s.to(p.dtype), sums, params))

    def update(grads: Updates, state: AdagradState, params: Params | None = None) -> tuple[Updates, AdagradState]:
        rate = rate_at(learning_rate, state.count)

        def direction(g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return (-rate * at_least_float32(g) / (at_least_float32(s).sqrt() + eps)).to(g.dtype)

        sums = tree.map(lambda g, s: (s + g * g).to(s.dtype), grads, state.sum_of_squares)
        return tree.map(direction, grads, sums), AdagradState(state.count + 1, sums)

    return Optimizer(init, update, elementwise=True)
