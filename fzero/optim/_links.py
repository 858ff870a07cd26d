"""Links of a chain: they scale updates, decay weights, or average."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero.optim._base import Mask, Optimizer, OptState, Params, Updates, apply_updates
from fzero.optim._hyperparams import Scalar, check_fraction, check_nonnegative, is_zero
from fzero.optim._schedules import Schedule
from fzero.optim._shapes import check_gradients_like
from fzero.sharding import per_leaf
from fzero.tree import Tree

__all__ = [
    "EmaState",
    "ScaleByScheduleState",
    "add_decayed_weights",
    "ema",
    "params_ema",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "set_to_zero",
]

# Optimizers that multiply gradients by a number: the last link of most chains.


class ScaleByScheduleState(NamedTuple):
    """The number of updates (int64, 0-d)."""

    count: torch.Tensor


def scale(factor: Scalar) -> Optimizer:
    """Multiply gradients by `factor`.

    Returns:
        An optimizer without state.

    Example:
        >>> scale(-0.5).update({"w": torch.tensor(2.0)}, ())[0]
        {'w': tensor(-1.)}
    """

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return _times(grads, factor), state

    return Optimizer(lambda params: (), update, exact_on_shards=True)


def scale_by_schedule(schedule: Schedule) -> Optimizer:
    """Multiply gradients by the value of a schedule at the current number of updates.

    Args:
        schedule: see `fzero.optim.Schedule`. Its values keep their sign: to descend, return a negative rate.

    Returns:
        An optimizer; its state is a counter.

    Example:
        >>> opt = scale_by_schedule(lambda count: 1.0 / (1 + count))
        >>> grads, state = {"w": torch.tensor(2.0)}, opt.init({})
        >>> for _ in range(2):
        ...     updates, state = opt.update(grads, state)
        >>> updates
        {'w': tensor(1.)}
    """

    def init(params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(torch.zeros((), dtype=torch.int64, device="cpu"))

    def update(
        grads: Updates, state: ScaleByScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScaleByScheduleState]:
        return _times(grads, schedule(state.count)), ScaleByScheduleState(state.count + 1)

    return Optimizer(init, update, exact_on_shards=True)


def scale_by_learning_rate(learning_rate: Scalar | Schedule) -> Optimizer:
    """Multiply gradients by minus the learning rate, to descend.

    Args:
        learning_rate: a number, or a schedule.

    Returns:
        An optimizer. It has no state for a number, and a counter for a schedule.

    Raises:
        ValueError: if `learning_rate` is a negative number.

    Example:
        >>> chained = scale_by_learning_rate(0.1)
        >>> chained.update({"w": torch.tensor(2.0)}, ())[0]
        {'w': tensor(-0.2000)}
    """
    if callable(learning_rate):
        return scale_by_schedule(lambda count: -learning_rate(count))
    check_nonnegative(learning_rate=learning_rate)
    return scale(-learning_rate)


def set_to_zero() -> Optimizer:
    """Replace gradients by zeros. With `masked` this freezes leaves.

    Returns:
        An optimizer without state.

    Example:
        >>> from fzero.optim import masked
        >>> frozen = masked(set_to_zero(), {"w": True, "b": False})
        >>> grads = {"w": torch.ones(()), "b": torch.ones(())}
        >>> frozen.update(grads, frozen.init(grads))[0]
        {'w': tensor(0.), 'b': tensor(1.)}
    """

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return tree.map(torch.zeros_like, grads), state

    return Optimizer(lambda params: (), update, exact_on_shards=True)


def _times(grads: Updates, factor: Scalar) -> Updates:
    return tree.elementwise(lambda g: (g * factor).to(g.dtype), grads)


# Weight decay.


def add_decayed_weights(weight_decay: Scalar, mask: Mask | None = None) -> Optimizer:
    """Add a fraction of the parameters to their gradients.

    In a chain before an optimizer this is L2 regularisation. Between an optimizer's direction and its learning rate it
    is decoupled weight decay (arXiv:1711.05101).

    Args:
        weight_decay: the fraction.
        mask: which leaves decay: a tree of bools, or a function that returns one from the tree of full leaves (as meta
            tensors). By default all leaves decay.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `weight_decay` is negative. On update, if `weight_decay` is not 0 and `params` is not given, or
            if `mask` has another structure than `params`.

    Example:
        >>> import torch
        >>> params = {"w": torch.tensor(2.0)}
        >>> add_decayed_weights(0.1).update({"w": torch.tensor(1.0)}, (), params)[0]
        {'w': tensor(1.2000)}
    """
    check_nonnegative(weight_decay=weight_decay)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        if is_zero(weight_decay):
            return grads, state
        if params is None:
            raise ValueError("weight decay needs the parameters: opt.update(grads, state, params)")
        decays = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
        return tree.elementwise(lambda g, p, d: (g + weight_decay * d * p).to(g.dtype), grads, params, decays), state

    return Optimizer(lambda params: (), update, exact_on_shards=True)


# Exponential moving averages: of the parameters, or of any tree.


class EmaState(NamedTuple):
    """The number of updates (int64, 0-d), and the average, on the layout of the averaged tree."""

    count: torch.Tensor
    ema: Tree


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
