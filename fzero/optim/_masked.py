"""A pair on some leaves only."""

import torch

from fzero import tree
from fzero.layout.segments import per_leaf
from fzero.optim._base import Mask, Optimizer, OptState, Pair, Params, Updates, around, as_optimizer
from fzero.tree import Tree

__all__ = ["masked"]


def masked(pair: Pair, mask: Mask) -> Optimizer:
    """Apply a pair to the leaves where `mask` is True; pass the gradients of the others unchanged.

    The numbers are `optax.masked`'s, on any layout: a shard may hold leaves of both kinds. The pair sees zeros as the
    gradients and as the parameters of the others, so they count in no norm, and their state stays as `init` made it.
    That state exists (optax leaves it out), because a tree's structure must not depend on how it is cut. So mask links
    without state, such as `scale_by_learning_rate`, behind one `scale_by_adam`: two masked `adamw` hold the moments
    twice. Leaves that must cost no memory belong into a tree of their own.

    Args:
        pair: an (init, update) pair.
        mask: a tree of bools with the structure of the whole parameters, or a function from the tree of whole leaves
            (as meta tensors) to one.

    Returns:
        A pair; its state is the state of `pair`.

    Raises:
        ValueError: if `pair` keeps master weights or a loss scale, which go around; on use, if `mask` has another
            structure than the parameters, or differs on tied leaves. Names the path.

    Example:
        >>> from fzero import optim
        >>> opt = masked(optim.sgd(0.1), lambda params: tree.map(lambda p: p.ndim >= 1, params))
        >>> params = {"w": torch.ones(2), "b": torch.ones(())}
        >>> opt.update(params, opt.init(params), params)[0]
        {'w': tensor([-0.1000, -0.1000]), 'b': tensor(1.)}
    """
    known = as_optimizer(pair)
    if known.precision is not None or known.skips:
        raise ValueError("masked: put master_weights, and a loss scale, around masked: they keep state of all leaves")

    def chosen(values: Tree, applies: Tree) -> Tree:
        return tree.map(lambda x, m: _where(m, x, torch.zeros_like(x)), values, applies)

    def init(params: Params) -> OptState:
        return pair.init(chosen(params, per_leaf(params, mask)))

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        applies = per_leaf(grads, mask)
        inner = None if params is None else chosen(params, applies)
        updates, state = pair.update(chosen(grads, applies), state, params=inner)
        return tree.map(lambda g, m, u: _where(m, u, g), grads, applies, updates), state

    return around(init, update, pair)


def _where(mask: Mask, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Choose by one number for all elements, or by a tensor of a number each."""
    if isinstance(mask, torch.Tensor):
        return torch.where(mask != 0, x, y)
    return x if mask else y
