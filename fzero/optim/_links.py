"""Links of a chain: they scale updates, or decay weights."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_callable
from fzero._tracebacks import api_boundary
from fzero.optim._base import Mask, Optimizer, OptState, Params, Updates, check_mask, check_mask_fits, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_nonnegative, check_number, check_rate, is_zero
from fzero.optim._schedules import Schedule
from fzero.sharding import per_leaf

__all__ = [
    "ScaleByScheduleState",
    "add_decayed_weights",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "set_to_zero",
]


class ScaleByScheduleState(NamedTuple):
    """The number of updates (int64, 0-d)."""

    count: torch.Tensor


@api_boundary
@optimizer_factory
def scale(factor: Scalar) -> Optimizer:
    """Multiply gradients by `factor`.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `factor` is not a number or a 0-d tensor.

    Example:
        >>> scale(-0.5).update({"w": torch.tensor(2.0)}, ())[0]
        {'w': tensor(-1.)}
    """
    check_number(factor=factor)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return _multiply_updates(grads, factor), state

    return Optimizer(lambda params: (), update, exact_on_shards=True)


@api_boundary
@optimizer_factory
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
    check_callable("schedule", schedule, "a function of the number of updates; for a number see optim.scale")

    def init(params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(torch.zeros((), dtype=torch.int64, device="cpu"))

    def update(
        grads: Updates, state: ScaleByScheduleState, params: Params | None = None
    ) -> tuple[Updates, ScaleByScheduleState]:
        return _multiply_updates(grads, schedule(state.count)), ScaleByScheduleState(state.count + 1)

    return Optimizer(init, update, exact_on_shards=True)


@api_boundary
@optimizer_factory
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
    check_rate(learning_rate)
    if callable(learning_rate):
        return scale_by_schedule(lambda count: -learning_rate(count))
    return scale(-learning_rate)


@api_boundary
@optimizer_factory
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


def _multiply_updates(grads: Updates, factor: Scalar) -> Updates:
    return tree.elementwise(lambda g: (g * factor).to(g.dtype), grads)


@api_boundary
@optimizer_factory
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
    check_mask(mask)

    def init(params: Params) -> OptState:
        check_mask_fits(mask, params)
        return ()

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        if is_zero(weight_decay):
            return grads, state
        if params is None:
            raise ValueError("weight decay needs the parameters: opt.update(grads, state, params)")
        decays = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
        return tree.elementwise(lambda g, p, d: (g + weight_decay * d * p).to(g.dtype), grads, params, decays), state

    return Optimizer(init, update, exact_on_shards=True)
