"""Clipping: by value, by the norm of the whole tree, by the size of each leaf."""

from typing import Any

import torch

from fzero import tree
from fzero.layout.segments import global_norm
from fzero.optim._base import Optimizer, OptState, Params, Updates
from fzero.optim._hyper import Number, at_least_float32, positive
from fzero.optim._norms import leaf_rms
from fzero.optim._words import answers

__all__ = ["clip", "clip_by_block_rms", "clip_by_global_norm"]


@answers
def clip(max_delta: Number) -> Optimizer:
    """Clip each element of the gradients to `[-max_delta, max_delta]`.

    Args:
        max_delta: the largest absolute value that passes unchanged.

    Returns:
        A pair without state.

    Raises:
        ValueError: if `max_delta` is not positive.

    Example:
        >>> clip(1.0).update({"w": torch.tensor([3.0, -0.5])}, ())[0]
        {'w': tensor([ 1.0000, -0.5000])}
    """
    positive(max_delta=max_delta)
    limit: Any = max_delta  # torch's annotation of clamp wants two numbers or two tensors

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return tree.map(lambda g: g.clamp(-limit, limit).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update, elementwise=True)


@answers
def clip_by_global_norm(max_norm: Number) -> Optimizer:
    """Scale all gradients by `min(1, max_norm / norm)`, where norm is over the whole tree on all ranks.

    Exact on every layout: shards are summed over their ranks, replicated leaves counted once, padding never. The
    formula is arXiv:1211.5063's; `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm.

    Args:
        max_norm: the largest 2-norm that passes unchanged.

    Returns:
        A pair without state.

    Raises:
        ValueError: if `max_norm` is not positive.

    Example:
        >>> updates, _ = clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, ())
        >>> updates
        {'w': tensor([0.6000, 0.8000])}
    """
    positive(max_norm=max_norm)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        norm = global_norm(grads)
        scale = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        return tree.map(lambda g: (g * scale).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update, elementwise=True, pointwise=False)


def clip_by_block_rms(threshold: Number) -> Optimizer:
    """Scale each leaf's gradient by `min(1, threshold / rms)`, with the root of its mean square (arXiv:1804.04235).

    Exact on every layout, by one psum of a number a leaf.

    Args:
        threshold: the largest root mean square that passes unchanged.

    Returns:
        A pair without state.

    Raises:
        ValueError: if `threshold` is not positive.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([3.0, 3.0]), "b": torch.tensor([0.5])}, ())[0]
        {'w': tensor([1., 1.]), 'b': tensor([0.5000])}
    """
    positive(threshold=threshold)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        def clipped(g: torch.Tensor, rms: torch.Tensor) -> torch.Tensor:
            return (at_least_float32(g) / (rms / threshold).clamp(min=1)).to(g.dtype)

        return tree.map(clipped, grads, leaf_rms(grads)), state

    return Optimizer(lambda params: (), update, elementwise=True, pointwise=False)
