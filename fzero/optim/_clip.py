"""Clipping by the global norm."""

from typing import Any

import torch

from fzero import tree
from fzero.optim._base import Optimizer
from fzero.segments import global_norm

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float) -> Optimizer:
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
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: expected a positive number")

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(grads)
        scale = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        return tree.map(lambda g: (g * scale).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update, elementwise=True)
