"""Adam and AdamW."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.optim._base import Optimizer
from fzero.optim._schedules import Schedule, rate_at
from fzero.segments import per_leaf

__all__ = ["AdamState", "adam", "adamw"]


class AdamState(NamedTuple):
    """The number of updates done (int64, 0-d) and the two moments, like the parameters."""

    count: torch.Tensor
    mu: Any
    nu: Any


def adam(learning_rate: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam (arXiv:1412.6980): `torch.optim.Adam`'s numbers.

    See `adamw`, with no weight decay.

    Example:
        >>> opt = adam(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay=0.0)


def adamw(
    learning_rate: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Any = None,
) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101): `torch.optim.AdamW`'s numbers.

    Args:
        learning_rate: a number, or a schedule.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the fraction of a parameter, times the rate, that is taken off each update.
        mask: which leaves decay: a tree of bools, or a function from the tree of whole leaves (as meta tensors)
            to one. By default all do.

    Returns:
        A pair; its state has two moments an element, of the parameter's dtype.

    Raises:
        ValueError: on update, if `weight_decay` is not 0 and `params` is not given, or if `mask` has another
            structure than `params`.

    Example:
        >>> from fzero import tree
        >>> opt = adamw(3e-4, mask=lambda params: tree.map(lambda p: p.ndim >= 2, params))
    """

    def init(params: Any) -> AdamState:
        count = torch.zeros((), dtype=torch.int64)
        return AdamState(count, tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        rate, count = rate_at(learning_rate, state.count), state.count + 1
        t = count.to(torch.float64)
        c1, c2 = 1 - b1**t, (1 - b2**t).sqrt()
        mu = tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.nu)
        updates = tree.map(lambda m, v: (-rate * (m / c1) / (v.sqrt() / c2 + eps)).to(m.dtype), mu, nu)
        if weight_decay:
            if params is None:
                raise ValueError("adamw with weight_decay needs the parameters: opt.update(grads, state, params)")
            decay = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
            updates = tree.map(
                lambda u, p, d: (u - rate * weight_decay * d * p).to(u.dtype),
                updates,
                params,
                decay,
            )
        return updates, AdamState(count, mu, nu)

    return Optimizer(init, update, elementwise=True)
