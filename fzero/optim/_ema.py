"""Exponential moving averages: of the parameters, or of any tree."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero.optim._base import Number, Optimizer, Params, Updates, apply_updates, fraction
from fzero.tree import Tree

__all__ = ["EmaState", "ema", "params_ema"]


class EmaState(NamedTuple):
    """The number of updates done (int64, 0-d), and the average, on the layout of its values."""

    count: torch.Tensor
    ema: Tree


def params_ema(decay: Number, debias: bool = False, accumulator_dtype: torch.dtype | None = None) -> Optimizer:
    """Keep the moving average of the parameters, for evaluation; updates pass unchanged.

    Put it last in a chain: it averages the parameters as they will be after the update. The average is in the state,
    `opt_state[-1].ema`, a tree like the parameters; `step.gather` makes it whole.

    Args:
        decay: how much of the average stays: `average = decay * average + (1 - decay) * params`.
        debias: whether to forget the initial parameters: then the average is that of the updated ones alone (Adam's
            correction, arXiv:1412.6980), else it starts from them.
        accumulator_dtype: the dtype of the average; by default the parameters'. With half-precision parameters pass
            torch.float32: a small change would be lost in rounding.

    Returns:
        A pair.

    Raises:
        ValueError: if `decay` is not in [0, 1); on update, if `params` is not given.

    Example:
        >>> from fzero import optim
        >>> opt = optim.chain(optim.sgd(1.0), optim.params_ema(0.5))
        >>> params = {"w": torch.tensor(1.0)}
        >>> updates, state = opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)
        >>> optim.apply_updates(params, updates), state[-1].ema
        ({'w': tensor(-1.)}, {'w': tensor(0.)})
    """
    fraction(decay=decay)

    def init(params: Params) -> EmaState:
        # copies: a jitted step overwrites parameters and state, each in its own memory
        copies = tree.map(lambda p: p.to(accumulator_dtype or p.dtype, copy=True), params)
        return EmaState(torch.zeros((), dtype=torch.int64), copies)

    def update(grads: Updates, state: EmaState, params: Params | None = None) -> tuple[Updates, EmaState]:
        if params is None:
            raise ValueError("an average of the parameters needs them: opt.update(grads, state, params)")
        count = state.count + 1
        # the debiased average is an average, too: the first value has weight 1
        weight = (1 - decay) / (1 - decay ** count.to(torch.float64)) if debias else 1 - decay
        average = tree.map(
            lambda p, a: (a + weight * (p.to(a.dtype) - a)).to(a.dtype), apply_updates(params, grads), state.ema
        )
        return grads, EmaState(count, average)

    return Optimizer(init, update, elementwise=True)


def ema(decay: Number, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> Optimizer:
    """Replace values by their moving average: `optax.ema`'s numbers.

    In a chain it averages the gradients or updates. In a step of one's own it averages any tree of the parameters'
    layout; for the parameters themselves `params_ema` is simpler.

    Args:
        decay: how much of the average stays: `average = decay * average + (1 - decay) * values`, from zero.
        debias: whether to divide the result by `1 - decay^t`, which the zero at the start has taken off it.
        accumulator_dtype: the dtype of the average; by default that of `values`.

    Returns:
        A pair, `update(values, state) -> (average, state)`.

    Raises:
        ValueError: if `decay` is not in [0, 1).

    Example:
        >>> pair = ema(0.9)
        >>> average, state = pair.update({"w": torch.tensor(2.0)}, pair.init({"w": torch.tensor(0.0)}))
        >>> average, state.ema
        ({'w': tensor(2.)}, {'w': tensor(0.2000)})
    """
    fraction(decay=decay)

    def init(params: Params) -> EmaState:
        zeros = tree.map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype), params)
        return EmaState(torch.zeros((), dtype=torch.int64), zeros)

    def update(grads: Updates, state: EmaState, params: Params | None = None) -> tuple[Updates, EmaState]:
        count = state.count + 1
        left = 1 - decay ** count.to(torch.float64) if debias else 1.0
        average = tree.map(lambda x, a: (decay * a + (1 - decay) * x).to(a.dtype), grads, state.ema)
        return tree.map(lambda x, a: (a / left).to(x.dtype), grads, average), EmaState(count, average)

    return Optimizer(init, update, elementwise=True)
