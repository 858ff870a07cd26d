"""Tensors as a step takes and gives them: without a graph of their own, in memory of their own, and like the old."""

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._torch import storage_id
from fzero._torch.levels import is_wrapped
from fzero.tree import Tree

__all__ = ["as_value", "copied_from", "is_like"]


def as_value(x: Any) -> Any:
    """Return a tensor without its own `requires_grad`; a tensor that a graph or a transform made stays as it is."""
    own = isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf and not is_wrapped(x)
    return x.detach() if own else x


def copied_from(values: Tree) -> Callable[[Any], Any]:
    """Return a function that copies tensors that share memory with `values`, which a jitted step may overwrite."""
    lent = {storage_id(x) for x in tree.tensors(values)}
    return lambda x: x.clone() if isinstance(x, torch.Tensor) and storage_id(x) in lent else x


def is_like(x: Tree, y: Tree) -> bool:
    """Return whether two trees of tensors have one structure, and tensors of one shape and dtype at each place."""
    (xs, structure), (ys, other) = tree.flatten(x), tree.flatten(y)
    is_tree = not isinstance(x, torch.Tensor) and any(isinstance(a, torch.Tensor) for a in xs)
    return is_tree and structure == other and [tree.show(a) for a in xs] == [tree.show(b) for b in ys]
