"""Loss scales: keep half-precision gradients within their range, and skip steps that overflowed."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.collectives import psum, to_host
from fzero.optim._base import (
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    as_optimizer,
    find_state,
    optimizer_factory,
    wrap_optimizers,
)
from fzero.optim._hyperparams import check_positive
from fzero.sharding import Shard, is_box, map_spaces, zero_padding

__all__ = ["LossScaleState", "all_finite", "dynamic_loss_scale", "loss_scale", "static_loss_scale"]


class LossScaleState(NamedTuple):
    """The scale of the loss, and the state of the optimizer.

    Attributes:
        scale: the factor for the next loss: float32, 0-d.
        growth: the number of good steps since the scale changed: int64, 0-d.
        skipped: the number of steps that overflowed and changed nothing: int64, 0-d.
        inner: the state of the optimizer.
    """

    scale: torch.Tensor
    growth: torch.Tensor
    skipped: torch.Tensor
    inner: OptState


@api_boundary
@optimizer_factory
def dynamic_loss_scale(
    opt: OptimizerLike,
    initial: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum: float = 1.0,
    maximum: float = 2.0**24,
) -> Optimizer:
    """Skip steps whose gradients overflowed, and adapt the loss scale so that few do (arXiv:1710.03740).

    The reduced gradients decide whether a step counts, by one psum of a number, so all ranks agree. The choice is a
    `where`, so Python never waits for the value. A skipped step leaves the parameters and the optimizer's state bit for
    bit unchanged. Wrap the whole chain in it. `fzero.scaled_value_and_grad` scales the loss, and divides the gradients
    by the scale. The numbers are those of `torch.amp.GradScaler`.

    Args:
        opt: an (init, update) pair.
        initial: the first scale.
        growth_factor: multiplies the scale after `growth_interval` good steps in a row.
        backoff_factor: multiplies the scale after a step that overflowed.
        growth_interval: the number of good steps between two growths.
        minimum: the smallest scale.
        maximum: the largest scale.

    Returns:
        An optimizer; its state is a `LossScaleState`.

    Raises:
        ValueError: if a number is not positive, `growth_factor` is below 1, `backoff_factor` is above 1, `initial` is
            not from `minimum` to `maximum`, or `growth_interval` is not an int.

    Example:
        >>> from fzero import optim
        >>> opt, params = dynamic_loss_scale(optim.sgd(0.5), initial=8.0), {"w": torch.tensor(1.0)}
        >>> updates, state = opt.update({"w": torch.tensor(float("inf"))}, opt.init(params), params)
        >>> optim.apply_updates(params, updates), state.scale, state.skipped
        ({'w': tensor(1.)}, tensor(4.), tensor(1))
    """
    if as_optimizer(opt).skips_overflow:
        raise ValueError(
            f"dynamic_loss_scale: opt is {as_optimizer(opt)!r}, which has a loss scale already: wrap it once"
        )
    check_positive(initial=initial, growth_factor=growth_factor, growth_interval=growth_interval)
    check_positive(backoff_factor=backoff_factor, minimum=minimum, maximum=maximum)
    if growth_interval != int(growth_interval):
        raise ValueError(f"growth_interval={growth_interval}: expected an int")
    if growth_factor < 1 or backoff_factor > 1 or not minimum <= initial <= maximum < math.inf:
        raise ValueError(
            f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, initial={initial}: expected at least 1, "
            f"at most 1, and from minimum={minimum} to maximum={maximum}"
        )

    def init(params: Params) -> LossScaleState:
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        return LossScaleState(
            torch.tensor(initial, dtype=torch.float32, device="cpu"), zero, zero.clone(), opt.init(params)
        )

    def update(grads: Updates, state: LossScaleState, params: Params | None = None) -> tuple[Updates, LossScaleState]:
        """Return the updates, which are zero if a gradient overflowed, and the state with the next scale."""
        is_finite = all_finite(grads)
        updates, inner = opt.update(grads, state.inner, params=params)
        # x + -0.0 is x for every x; 0.0 would change a parameter of -0.0 to 0.0
        updates = map_spaces(lambda space, u: _select_if_good(is_finite, space, u, torch.full_like(u, -0.0)), updates)
        inner = map_spaces(partial(_select_if_good, is_finite), inner, state.inner)
        growth = torch.where(is_finite, state.growth + 1, torch.zeros_like(state.growth))
        grows = growth >= growth_interval
        larger = (state.scale * growth_factor).clamp(max=maximum)
        smaller = (state.scale * backoff_factor).clamp(min=minimum)
        scale = torch.where(is_finite, torch.where(grows, larger, state.scale), smaller)
        growth = torch.where(grows, torch.zeros_like(growth), growth)
        return updates, LossScaleState(scale, growth, state.skipped + ~is_finite, inner)

    return replace(wrap_optimizers(init, update, opt), skips_overflow=True)


@api_boundary
@optimizer_factory
def static_loss_scale(opt: OptimizerLike, scale: float) -> Optimizer:
    """Skip steps whose gradients overflowed, at a constant loss scale. See `dynamic_loss_scale`.

    Args:
        opt: an (init, update) pair.
        scale: the factor for the loss; a power of two causes no rounding.

    Returns:
        An optimizer; its state is a `LossScaleState`.

    Raises:
        ValueError: if `scale` is not positive.

    Example:
        >>> from fzero import optim
        >>> static_loss_scale(optim.sgd(0.5), 1024.0).init({"w": torch.ones(2)}).scale
        tensor(1024.)
    """
    return dynamic_loss_scale(opt, scale, 1.0, 1.0, minimum=scale, maximum=scale)


@api_boundary
def loss_scale(opt_state: OptState) -> LossScaleState:
    """Return the loss scale's state from an optimizer's state, for `fzero.scaled_value_and_grad` and for metrics.

    Raises:
        ValueError: if `opt_state` holds no loss scale, or several.

    Example:
        >>> from fzero import optim
        >>> opt = dynamic_loss_scale(optim.chain(optim.clip(1.0), optim.sgd(0.5)))
        >>> loss_scale(opt.init({"w": torch.ones(2)})).scale
        tensor(65536.)
    """
    return find_state(opt_state, LossScaleState)


@api_boundary
def all_finite(grads: Updates) -> torch.Tensor:
    """Return whether all elements of a tree are finite on all ranks, on any layout. It takes one psum per set of axes.

    Returns:
        A 0-d bool tensor, equal on all ranks if the replicated leaves are.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
        tensor(False)
    """
    nonfinite: dict[tuple[str, ...], list[torch.Tensor]] = {(): []}
    for x in tree.flatten(grads, is_box)[0]:
        if isinstance(x, Shard):
            nonfinite.setdefault(x.axes, []).append(_has_nonfinite(zero_padding(x)))
        elif isinstance(x, torch.Tensor):
            nonfinite[()].append(_has_nonfinite(x))
    counts = [psum(torch.stack(flags).sum(), axes) for axes, flags in nonfinite.items() if flags]
    return torch.stack(counts).sum() == 0 if counts else torch.tensor(True, device="cpu")


def _has_nonfinite(x: torch.Tensor) -> torch.Tensor:
    return (~x.isfinite()).any().to(torch.float32)


def _select_if_good(is_finite: torch.Tensor, space: str, new_values: Any, old_values: Any) -> Any:
    if not isinstance(new_values, torch.Tensor):
        return new_values
    return torch.where(to_host(is_finite) if space == "host" else is_finite, new_values, old_values)
