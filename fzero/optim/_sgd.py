"""Stochastic gradient descent."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero.optim._base import Number, Optimizer, Params, Updates, check_rate, is_zero, nonnegative, rate_at, torch_hints
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = ["SgdState", "sgd"]


class SgdState(NamedTuple):
    """The number of updates (int64, 0-d), and the momentum buffers, a tree like the parameters (or None)."""

    count: torch.Tensor
    momentum: Tree


@torch_hints
def sgd(learning_rate: Number | Schedule, momentum: Number = 0.0, nesterov: bool = False) -> Optimizer:
    """Descend along the gradient, optionally with momentum: `torch.optim.SGD`'s numbers.

    Args:
        learning_rate: a number, or a schedule.
        momentum: the decay of the momentum buffers; with 0 there are none.
        nesterov: whether to look ahead (Sutskever et al., ICML 2013, as torch.optim writes it).

    Returns:
        A pair.

    Raises:
        ValueError: if a number is negative, or `nesterov` is true without momentum.

    Example:
        >>> opt = sgd(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.2000)}
    """
    check_rate(learning_rate)
    nonnegative(momentum=momentum)
    has_momentum = not is_zero(momentum)
    if nesterov and not has_momentum:
        raise ValueError(f"nesterov=True needs momentum > 0, given momentum={momentum!r}")

    def init(params: Params) -> SgdState:
        return SgdState(
            torch.zeros((), dtype=torch.int64),
            tree.map(torch.zeros_like, params) if has_momentum else None,
        )

    def update(grads: Updates, state: SgdState, params: Params | None = None) -> tuple[Updates, SgdState]:
        rate = rate_at(learning_rate, state.count)
        buffers, direction = None, grads
        if has_momentum:
            # the first buffer is zero, so it becomes the gradient, as in torch
            buffers = tree.map(lambda g, b: (momentum * b + g).to(b.dtype), grads, state.momentum)
            direction = tree.map(lambda g, b: g + momentum * b, grads, buffers) if nesterov else buffers
        return tree.map(lambda d: (-rate * d).to(d.dtype), direction), SgdState(state.count + 1, buffers)

    return Optimizer(init, update, elementwise=True)
