"""Lion."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero.optim._base import Mask, Number, Optimizer, Params, Updates, chain, fraction, torch_hints
from fzero.optim._scale import add_decayed_weights, scale_by_learning_rate
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = ["LionState", "lion", "scale_by_lion"]


class LionState(NamedTuple):
    """The moving average of the gradients, a tree like the parameters."""

    mu: Tree


@torch_hints
def lion(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    weight_decay: Number = 1e-3,
    mask: Mask | None = None,
) -> Optimizer:
    """Step by the sign of an average of gradients (arXiv:2302.06675): `optax.lion`'s numbers.

    A good rate is 3 to 10 times smaller than AdamW's, and a good decay 3 to 10 times larger.

    Args:
        learning_rate: a number, or a schedule.
        b1: the weight of the average in the direction; the gradient has weight 1 - b1.
        b2: the decay of the average.
        weight_decay: the fraction of a parameter, times the rate, that is subtracted in each update.
        mask: which leaves decay; see `add_decayed_weights`.

    Returns:
        A pair, the chain of `scale_by_lion`, `add_decayed_weights` and `scale_by_learning_rate`. Its state has one
        number per element, of the parameter's dtype.

    Raises:
        ValueError: if `b1` or `b2` is not in [0, 1), or the rate or the decay is negative. On update, if there is a
            decay and `params` is not given.

    Example:
        >>> opt = lion(0.1, weight_decay=0.5)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1500)}
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@torch_hints
def scale_by_lion(b1: Number = 0.9, b2: Number = 0.99) -> Optimizer:
    """Replace gradients by Lion's direction: the sign of an average of gradients. See `lion`.

    Example:
        >>> pair = scale_by_lion()
        >>> pair.update({"w": torch.tensor(-2.0)}, pair.init({"w": torch.tensor(1.0)}))[0]
        {'w': tensor(-1.)}
    """
    fraction(b1=b1, b2=b2)

    def init(params: Params) -> LionState:
        return LionState(tree.map(torch.zeros_like, params))

    def update(grads: Updates, state: LionState, params: Params | None = None) -> tuple[Updates, LionState]:
        signs = tree.map(lambda g, m: torch.sign((1 - b1) * g + b1 * m).to(g.dtype), grads, state.mu)
        return signs, LionState(tree.map(lambda g, m: (b2 * m + (1 - b2) * g).to(m.dtype), grads, state.mu))

    return Optimizer(init, update, elementwise=True)
