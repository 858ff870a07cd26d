"""Adam and AdamW."""

from functools import partial
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero.optim._base import Mask, Optimizer, Params, Updates, check_mask, check_mask_fits, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_fraction, check_nonnegative, check_rate, is_zero, rate_at
from fzero.optim._schedules import Schedule
from fzero.optim.checks import torch_hints
from fzero.optim.moments import Moments, MomentsLike, check_moment, init_moment, map_moments, read_moments
from fzero.sharding import per_leaf
from fzero.tree import Tree

__all__ = ["AdamState", "adam", "adamw", "scale_by_adam"]


class AdamState(NamedTuple):
    """The number of updates (int64, 0-d), and the two moments: like the parameters, or in fewer bytes."""

    count: torch.Tensor
    mu: Tree
    nu: Tree


@torch_hints
@optimizer_factory
def adam(
    learning_rate: Scalar | Schedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    moments: MomentsLike = None,
) -> Optimizer:
    """Adam (arXiv:1412.6980): `torch.optim.Adam`'s numbers.

    It is `adamw` without weight decay.

    Example:
        >>> opt = adam(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init(params), params)[0]
        {'w': tensor(-0.1000)}
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay=0.0, moments=moments)


@torch_hints
@optimizer_factory
def adamw(
    learning_rate: Scalar | Schedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
    moments: MomentsLike = None,
) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101): `torch.optim.AdamW`'s numbers.

    Args:
        learning_rate: a number, or a schedule.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the fraction of a parameter, times the rate, that is subtracted in each update.
        mask: which leaves decay: a tree of bools, or a function that returns one from the tree of full leaves (as meta
            tensors). By default all leaves decay.
        moments: how to store the moments: "int8" for a byte an element, "bfloat16" for two, or an `optim.Moments`; by
            default in the parameter's dtype. The update reads them before they are rounded.

    Returns:
        An optimizer; its state has two moments per element.

    Raises:
        ValueError: if `b1` or `b2` is not in [0, 1), or another hyperparameter is negative. On update, if
            `weight_decay` is not 0 and `params` is not given, or if `mask` has another structure than `params`.

    Example:
        >>> from fzero import tree
        >>> opt = adamw(3e-4, mask=lambda params: tree.map(lambda p: p.ndim >= 2, params))
    """
    check_rate(learning_rate)
    check_mask(mask)
    check_fraction(b1=b1, b2=b2)
    check_nonnegative(eps=eps, weight_decay=weight_decay)
    policy = read_moments(moments)

    def init(params: Params) -> AdamState:
        check_mask_fits(mask, params)
        return _init_moments(params, policy)

    def update(grads: Updates, state: AdamState, params: Params | None = None) -> tuple[Updates, AdamState]:
        """Return the updates and the state after one step of AdamW, by units if its moments have fewer bits."""
        rate = rate_at(learning_rate, state.count)  # before the parameters: it finds the state of another optimizer
        if not is_zero(weight_decay) and params is None:
            raise ValueError("adamw with weight_decay needs the parameters: opt.update(grads, state, params)")
        if policy is not None:
            decay = None if is_zero(weight_decay) else rate * weight_decay
            return _update_by_unit(
                grads,
                state,
                params,
                mask,
                policy,
                hyperparams=_AdamHyperparams(b1=b1, b2=b2, eps=eps, rate=rate, decay=decay),
            )
        (count, mu, nu), r1, r2 = _update_moments(grads, state, b1, b2)
        updates = tree.elementwise(lambda m, v: _update_direction(m, v, -rate * r1, r2, eps).to(m.dtype), mu, nu)
        if not is_zero(weight_decay):
            updates = tree.elementwise(
                lambda u, p, is_decayed: (u - rate * weight_decay * is_decayed * p).to(u.dtype),
                updates,
                params,
                _decay_mask(params, mask),
            )
        return updates, AdamState(count, mu, nu)

    return Optimizer(init, update, exact_on_shards=True, elementwise=None if policy is None else False)


def _decay_mask(params: Params, mask: Mask | None) -> Tree:
    """Return for each leaf whether it decays."""
    return tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)


@torch_hints
@optimizer_factory
def scale_by_adam(b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, moments: MomentsLike = None) -> Optimizer:
    """Replace gradients by Adam's direction, the first moment over the root of the second (arXiv:1412.6980).

    Use it in your own chains. The direction points uphill, so end the chain with `scale_by_learning_rate`.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        moments: how to store the moments; see `adamw`.

    Returns:
        An optimizer; its state has two moments per element.

    Raises:
        ValueError: if `b1` or `b2` is not in [0, 1), or `eps` is negative.

    Example:
        >>> opt = scale_by_adam()
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init({"w": torch.tensor(1.0)}))[0]
        {'w': tensor(1.0000)}
    """
    check_fraction(b1=b1, b2=b2)
    check_nonnegative(eps=eps)
    policy = read_moments(moments)

    def update(grads: Updates, state: AdamState, params: Params | None = None) -> tuple[Updates, AdamState]:
        """Return Adam's directions, without a learning rate, and the state after one step."""
        if policy is not None:
            return _update_by_unit(
                grads,
                state,
                params=None,
                mask=None,
                policy=policy,
                hyperparams=_AdamHyperparams(b1=b1, b2=b2, eps=eps, rate=-1.0, decay=None),
            )
        state, r1, r2 = _update_moments(grads, state, b1, b2)

        def direction(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _update_direction(at_least_float32(m), at_least_float32(v), r1, r2, eps).to(m.dtype)

        return tree.elementwise(direction, state.mu, state.nu), state

    init = partial(_init_moments, policy=policy)
    return Optimizer(init, update, exact_on_shards=True, elementwise=None if policy is None else False)


def _init_moments(params: Params, policy: Moments | None = None) -> AdamState:
    count = torch.zeros((), dtype=torch.int64, device="cpu")
    return AdamState(count, init_moment(params, policy, signed=True), init_moment(params, policy, signed=False))


def _first_moment(g: Any, m: Any, b1: Scalar) -> Any:
    return (b1 * m + (1 - b1) * g).to(m.dtype)


def _second_moment(g: Any, v: Any, b2: Scalar) -> Any:
    return (b2 * v + (1 - b2) * g * g).to(v.dtype)


def _bias_corrections(t: torch.Tensor, b1: Scalar, b2: Scalar) -> tuple[Any, Any]:
    """Return two factors at step t, in float64: for the first moment, and for the root of the second moment.

    These are factors rather than divisors, because three divisions per element take longer than the memory traffic.
    """
    return 1 / (1 - b1**t), (1 - b2**t).rsqrt()


def _update_direction(m: Any, v: Any, factor: Any, root_factor: Any, eps: Scalar) -> Any:
    return m * factor / (v.sqrt() * root_factor + eps)


def _update_moments(grads: Updates, state: AdamState, b1: Scalar, b2: Scalar) -> tuple[AdamState, Any, Any]:
    """Return the new state, and the bias corrections."""
    check_moment(state.mu, grads, None)
    count = state.count + 1
    t = count.to(torch.float64)
    mu = tree.elementwise(lambda g, m: _first_moment(g, m, b1), grads, state.mu)
    nu = tree.elementwise(lambda g, v: _second_moment(g, v, b2), grads, state.nu)
    return AdamState(count, mu, nu), *_bias_corrections(t, b1, b2)


class _AdamHyperparams(NamedTuple):
    """The hyperparameters of one update; `decay` is the rate times the weight decay, None without decay."""

    b1: Scalar
    b2: Scalar
    eps: Scalar
    rate: Scalar
    decay: Any


def _update_by_unit(
    grads: Updates,
    state: AdamState,
    params: Params | None,
    mask: Mask | None,
    policy: Moments,
    hyperparams: _AdamHyperparams,
) -> tuple[Updates, AdamState]:
    """Return the updates and the new state, of moments in 8 or 16 bits: one unit after the other in float32."""
    b1, b2, eps, rate, decay = hyperparams
    check_moment(state.mu, grads, policy)
    count = state.count + 1
    t = count.to(torch.float64)
    r1, r2 = _bias_corrections(t, b1, b2)

    def step(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        gradient = g.to(m.dtype)
        m, v = _first_moment(gradient, m, b1), _second_moment(gradient, v, b2)
        u = _update_direction(m, v, -rate * r1, r2, eps).to(m.dtype)
        if rest:
            p, is_decayed = rest
            u = u - decay * is_decayed * p
        return u.to(g.dtype), m, v

    rest = () if decay is None else (params, _decay_mask(params, mask))
    updates, (mu, nu) = map_moments(step, (True, False), grads, (state.mu, state.nu), *rest)
    return updates, AdamState(count, mu, nu)
