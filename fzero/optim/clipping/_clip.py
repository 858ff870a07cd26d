"""Clipping: by value, by the norm of the whole tree, by the size of each leaf."""

from typing import Any

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._tracebacks import api_boundary
from fzero.optim._base import Optimizer, OptState, Params, Updates, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_positive
from fzero.optim._norms import leaf_rms
from fzero.optim.checks import torch_hints
from fzero.sharding import global_norm

__all__ = ["clip", "clip_by_block_rms", "clip_by_global_norm"]


@torch_hints
@optimizer_factory
def clip(max_delta: Scalar) -> Optimizer:
    """Clip each element of the gradients to `[-max_delta, max_delta]`.

    Args:
        max_delta: the largest absolute value that passes unchanged.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `max_delta` is not positive.

    Example:
        >>> clip(1.0).update({"w": torch.tensor([3.0, -0.5])}, ())[0]
        {'w': tensor([ 1.0000, -0.5000])}
    """
    check_positive(max_delta=max_delta)
    limit: Any = max_delta  # torch annotates clamp's limits as two numbers or two tensors

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return tree.map(lambda g: g.clamp(-limit, limit).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update, exact_on_shards=True)


@torch_hints
@optimizer_factory
def clip_by_global_norm(max_norm: Scalar) -> Optimizer:
    """Scale all gradients by `min(1, max_norm / norm)`, where norm is over the whole tree on all ranks.

    The norm is exact on every layout: shards are summed over their ranks, replicated leaves count once, and padding
    never. The formula is from arXiv:1211.5063; `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm.

    Args:
        max_norm: the largest 2-norm that passes unchanged.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `max_norm` is not positive.

    Example:
        >>> updates, _ = clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, ())
        >>> updates
        {'w': tensor([0.6000, 0.8000])}
    """
    check_positive(max_norm=max_norm)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        norm = global_norm(grads)
        scale = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        return tree.elementwise(lambda g: (g * scale).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update, exact_on_shards=True, elementwise=False)


@api_boundary
@optimizer_factory
def clip_by_block_rms(threshold: Scalar) -> Optimizer:
    """Scale each leaf's gradient by `min(1, threshold / rms)`, with its root mean square (arXiv:1804.04235).

    The result is exact on every layout. Shards take one psum of one number per leaf.

    Args:
        threshold: the largest root mean square that passes unchanged.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `threshold` is not positive.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([3.0, 3.0]), "b": torch.tensor([0.5])}, ())[0]
        {'w': tensor([1., 1.]), 'b': tensor([0.5000])}
    """
    check_positive(threshold=threshold)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        def clip_leaf(g: torch.Tensor, rms: torch.Tensor) -> torch.Tensor:
            return (at_least_float32(g) / (rms / threshold).clamp(min=1)).to(g.dtype)

        return tree.map(clip_leaf, grads, leaf_rms(grads)), state

    return Optimizer(lambda params: (), update, exact_on_shards=True, elementwise=False)
