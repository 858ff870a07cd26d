"""Optimizers whose state is one tree like the parameters: sgd, adagrad and lion."""

from typing import NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._dtypes import at_least_float32
from fzero.optim._base import Mask, Optimizer, Params, Updates, chain, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_fraction, check_nonnegative, check_rate, is_zero, rate_at
from fzero.optim._links import add_decayed_weights, scale_by_learning_rate
from fzero.optim._schedules import Schedule
from fzero.optim.checks import check_gradients_like, torch_hints
from fzero.optim.moments import MomentsLike, check_moment, init_moment, map_moments, read_moments
from fzero.tree import Tree

__all__ = ["AdagradState", "LionState", "SgdState", "adagrad", "lion", "scale_by_lion", "sgd"]


class SgdState(NamedTuple):
    """The number of updates (int64, 0-d), and the momentum buffers, a tree like the parameters (or None)."""

    count: torch.Tensor
    momentum: Tree


@torch_hints
@optimizer_factory
def sgd(learning_rate: Scalar | Schedule, momentum: Scalar = 0.0, nesterov: bool = False) -> Optimizer:
    """Descend along the gradient, optionally with momentum: `torch.optim.SGD`'s numbers.

    Args:
        learning_rate: a number, or a schedule.
        momentum: the decay of the momentum buffers; with 0 there are none.
        nesterov: whether to look ahead (Sutskever et al., ICML 2013, as torch.optim writes it).

    Returns:
        An optimizer.

    Raises:
        ValueError: if a number is negative, or `nesterov` is true without momentum. Also if `nesterov` is no bool, such
            as the third number of `torch.optim.SGD`, its dampening.

    Example:
        >>> opt = sgd(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.2000)}
    """
    check_rate(learning_rate)
    check_nonnegative(momentum=momentum)
    check_choice("nesterov", nesterov, (True, False))
    has_momentum = not is_zero(momentum)
    if nesterov and not has_momentum:
        raise ValueError(f"nesterov=True needs momentum > 0, given momentum={momentum!r}")

    def init(params: Params) -> SgdState:
        return SgdState(
            torch.zeros((), dtype=torch.int64, device="cpu"),
            tree.map(torch.zeros_like, params) if has_momentum else None,
        )

    def update(grads: Updates, state: SgdState, params: Params | None = None) -> tuple[Updates, SgdState]:
        rate = rate_at(learning_rate, state.count)
        buffers, direction = None, grads
        if has_momentum:
            check_gradients_like(state.momentum, grads, "state")
            # the first buffer is zero, so it becomes the gradient, as in torch
            buffers = tree.elementwise(lambda g, b: (momentum * b + g).to(b.dtype), grads, state.momentum)
            direction = tree.elementwise(lambda g, b: g + momentum * b, grads, buffers) if nesterov else buffers
        return tree.elementwise(lambda d: (-rate * d).to(d.dtype), direction), SgdState(state.count + 1, buffers)

    return Optimizer(init, update, exact_on_shards=True)


class AdagradState(NamedTuple):
    """The number of updates (int64, 0-d), and the sums of squared gradients, a tree like the parameters."""

    count: torch.Tensor
    sum_of_squares: Tree


@torch_hints
@optimizer_factory
def adagrad(
    learning_rate: Scalar | Schedule, initial_accumulator_value: Scalar = 0.0, eps: Scalar = 1e-10
) -> Optimizer:
    """Divide gradients by the root of the sum of all their squares (Duchi et al., JMLR 12, 2011).

    The numbers are `torch.optim.Adagrad`'s; `optax.adagrad` adds eps inside the root.

    Args:
        learning_rate: a number, or a schedule.
        initial_accumulator_value: the start of the sums of squares.
        eps: added to the root.

    Returns:
        An optimizer; its state has one number per element, of the parameter's dtype.

    Raises:
        ValueError: if a hyperparameter is negative.

    Example:
        >>> opt = adagrad(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    check_rate(learning_rate)
    check_nonnegative(initial_accumulator_value=initial_accumulator_value, eps=eps)

    def init(params: Params) -> AdagradState:
        sums = tree.map(lambda p: torch.zeros_like(p) + initial_accumulator_value, params)
        return AdagradState(
            torch.zeros((), dtype=torch.int64, device="cpu"), tree.map(lambda s, p: s.to(p.dtype), sums, params)
        )

    def update(grads: Updates, state: AdagradState, params: Params | None = None) -> tuple[Updates, AdagradState]:
        check_gradients_like(state.sum_of_squares, grads, "state")
        rate = rate_at(learning_rate, state.count)

        def direction(g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return (-rate * at_least_float32(g) / (at_least_float32(s).sqrt() + eps)).to(g.dtype)

        sums = tree.elementwise(lambda g, s: (s + g * g).to(s.dtype), grads, state.sum_of_squares)
        # by leaf: `at_least_float32` takes a tensor, and `tree.elementwise` may pass a list of them
        return tree.map(direction, grads, sums), AdagradState(state.count + 1, sums)

    return Optimizer(init, update, exact_on_shards=True)


class LionState(NamedTuple):
    """The moving average of the gradients, a tree like the parameters, or `Moments` in fewer bytes."""

    mu: Tree


@torch_hints
@optimizer_factory
def lion(
    learning_rate: Scalar | Schedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    weight_decay: Scalar = 1e-3,
    mask: Mask | None = None,
    moments: MomentsLike = None,
) -> Optimizer:
    """Step by the sign of an average of gradients (arXiv:2302.06675): `optax.lion`'s numbers.

    A good rate is 3 to 10 times smaller than AdamW's, and a good decay 3 to 10 times larger.

    Args:
        learning_rate: a number, or a schedule.
        b1: the weight of the average in the direction; the gradient has weight 1 - b1.
        b2: the decay of the average.
        weight_decay: the fraction of a parameter, times the rate, that is subtracted in each update.
        mask: which leaves decay; see `add_decayed_weights`.
        moments: how to store the average; see `adamw`.

    Returns:
        An optimizer, the chain of `scale_by_lion`, `add_decayed_weights` and `scale_by_learning_rate`. Its state has
        one number per element.

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
        scale_by_lion(b1, b2, moments),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@torch_hints
@optimizer_factory
def scale_by_lion(b1: Scalar = 0.9, b2: Scalar = 0.99, moments: MomentsLike = None) -> Optimizer:
    """Replace gradients by Lion's direction: the sign of an average of gradients. See `lion`.

    Example:
        >>> opt = scale_by_lion()
        >>> opt.update({"w": torch.tensor(-2.0)}, opt.init({"w": torch.tensor(1.0)}))[0]
        {'w': tensor(-1.)}
    """
    check_fraction(b1=b1, b2=b2)
    policy = read_moments(moments)

    def init(params: Params) -> LionState:
        return LionState(init_moment(params, policy, signed=True))

    def sign(g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return torch.sign((1 - b1) * g + b1 * m).to(g.dtype)

    def average(g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (b2 * m + (1 - b2) * g).to(m.dtype)

    def step(g: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = g.to(m.dtype)
        return sign(gradient, m).to(g.dtype), average(gradient, m)

    def update(grads: Updates, state: LionState, params: Params | None = None) -> tuple[Updates, LionState]:
        check_moment(state.mu, grads, policy)
        if policy is not None:
            signs, (mu,) = map_moments(step, (True,), grads, (state.mu,))
            return signs, LionState(mu)
        return tree.map(sign, grads, state.mu), LionState(tree.map(average, grads, state.mu))

    return Optimizer(init, update, exact_on_shards=True, elementwise=None if policy is None else False)
