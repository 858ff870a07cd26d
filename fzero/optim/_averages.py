"""Exponential moving averages: of the parameters, or of any tree."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._base import Optimizer, Params, Updates, apply_updates, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_fraction
from fzero.optim.checks import check_gradients_like
from fzero.tree import Tree

__all__ = ["EmaState", "ema", "params_ema"]


class EmaState(NamedTuple):
    """The number of updates (int64, 0-d), and the average, on the layout of the averaged tree."""

    count: torch.Tensor
    ema: Tree


@api_boundary
@optimizer_factory
def params_ema(decay: Scalar, debias: bool = False, accumulator_dtype: torch.dtype | None = None) -> Optimizer:
    """Keep a moving average of the parameters, for evaluation; updates pass unchanged.

    Put it last in a chain, since it averages the parameters after the update. The average is in the state,
    `opt_state[-1].ema`, a tree like the parameters; `step.gather` gathers it.

    Args:
        decay: the weight of the old average: `average = decay * average + (1 - decay) * params`.
        debias: whether the average excludes the initial parameters (Adam's correction, arXiv:1412.6980). Without it the
            average starts from them.
        accumulator_dtype: the dtype of the average; by default the parameters' dtype. With half-precision parameters
            pass torch.float32, or rounding loses small changes.

    Returns:
        An optimizer.

    Raises:
        ValueError: if `decay` is not in [0, 1). On update, if `params` is not given.

    Example:
        >>> from fzero import optim
        >>> opt = optim.chain(optim.sgd(1.0), optim.params_ema(0.5))
        >>> params = {"w": torch.tensor(1.0)}
        >>> updates, state = opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)
        >>> optim.apply_updates(params, updates), state[-1].ema
        ({'w': tensor(-1.)}, {'w': tensor(0.)})
    """
    check_fraction(decay=decay)

    def init(params: Params) -> EmaState:
        # copies: a jitted step overwrites parameters and state, each in its own memory
        copies = tree.map(lambda p: p.to(accumulator_dtype or p.dtype, copy=True), params)
        return EmaState(torch.zeros((), dtype=torch.int64, device="cpu"), copies)

    def update(grads: Updates, state: EmaState, params: Params | None = None) -> tuple[Updates, EmaState]:
        if params is None:
            raise ValueError("params_ema needs the parameters: opt.update(grads, state, params)")
        check_gradients_like(state.ema, grads, "state")
        count = state.count + 1
        # with this weight the average needs no correction; the first value has weight 1
        weight = (1 - decay) / (1 - decay ** count.to(torch.float64)) if debias else 1 - decay
        average = tree.map(
            lambda p, a: (a + weight * (p.to(a.dtype) - a)).to(a.dtype), apply_updates(params, grads), state.ema
        )
        return grads, EmaState(count, average)

    return Optimizer(init, update, exact_on_shards=True)


@api_boundary
@optimizer_factory
def ema(decay: Scalar, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> Optimizer:
    """Replace values by their moving average: `optax.ema`'s numbers.

    In a chain it averages the gradients or updates. In your own step it averages any tree on the parameters' layout; to
    average the parameters themselves, `params_ema` is simpler.

    Args:
        decay: the weight of the old average: `average = decay * average + (1 - decay) * values`, from zero.
        debias: whether to divide the result by `1 - decay^t`, to correct for the start at zero.
        accumulator_dtype: the dtype of the average; by default the dtype of `values`.

    Returns:
        An optimizer, `update(values, state) -> (average, state)`.

    Raises:
        ValueError: if `decay` is not in [0, 1).

    Example:
        >>> opt = ema(0.9)
        >>> average, state = opt.update({"w": torch.tensor(2.0)}, opt.init({"w": torch.tensor(0.0)}))
        >>> average, state.ema
        ({'w': tensor(2.)}, {'w': tensor(0.2000)})
    """
    check_fraction(decay=decay)

    def init(params: Params) -> EmaState:
        zeros = tree.map(lambda p: torch.zeros_like(p, dtype=accumulator_dtype), params)
        return EmaState(torch.zeros((), dtype=torch.int64, device="cpu"), zeros)

    def update(grads: Updates, state: EmaState, params: Params | None = None) -> tuple[Updates, EmaState]:
        check_gradients_like(state.ema, grads, "state")
        count = state.count + 1
        correction = 1 - decay ** count.to(torch.float64) if debias else 1.0
        average = tree.map(lambda x, a: (decay * a + (1 - decay) * x).to(a.dtype), grads, state.ema)
        return tree.map(lambda x, a: (a / correction).to(x.dtype), grads, average), EmaState(count, average)

    return Optimizer(init, update, exact_on_shards=True)
