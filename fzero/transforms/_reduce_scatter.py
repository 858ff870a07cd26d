"""reduce_scatter: per-rank full leaves → summed shards. One collective per unit; its transpose is gather."""

from typing import Any

import torch

from fzero import tree
from fzero.collectives import psum
from fzero.sharding import Shard, ShardedUnit, apply_to_unit, is_box, map_units, spec_of
from fzero.tree import Tree

__all__ = ["reduce_scatter"]


def reduce_scatter(grads: Tree, like: Tree) -> Tree:
    """Sum full gradients over the ranks, and return this rank's shard of each unit.

    This is the third transform, and the transpose of `gather`.

    Args:
        grads: a tree of tensors that differ by rank, with the structure of the gathered `like`.
        like: a tree of boxes, as `partition` returns it. The result has the same layout.

    Returns:
        A tree like `like` that holds sums (divide by `axis_size()` for means). Leaves that are replicated in `like` are
        summed by an all_reduce each.

    Raises:
        ValueError: if the trees differ in structure, or a gradient differs from its leaf in shape. The message names
            the leaf.

    Example:
        >>> import fzero, torch
        >>> f = lambda p: fzero.reduce_scatter(p, like=fzero.partition(p))
        >>> fzero.mesh(dp=2).spmd(f)({"w": torch.ones(4)})["w"].data
        tensor([[2., 2.],
                [2., 2.]])
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    full = tree.leaves_up_to(like, grads, is_box)
    for i, g in enumerate(full):
        if not is_box(entries[i]) and g is not None:
            entries[i] = psum(g)

    def summed(unit: ShardedUnit) -> Shard:
        (data,) = apply_to_unit("reduce_scatter", unit.spec_id, _sum_ties(unit, full, paths))
        return Shard(data, unit.spec_id)

    return map_units(summed, tree.unflatten(structure, entries))


def _sum_ties(unit: ShardedUnit, full: list[Any], paths: list[str]) -> list[torch.Tensor]:
    """Return a unit's full gradients in the unit's order; gradients of one tied leaf are summed."""
    leaves: dict[int, torch.Tensor] = {}
    for position, index in unit.members:
        g = full[position]
        expected = list(spec_of(unit.spec_id).shapes[index])
        if not isinstance(g, torch.Tensor) or list(g.shape) != expected:
            shown = list(g.shape) if isinstance(g, torch.Tensor) else repr(g)
            raise ValueError(f"grads leaf {paths[position]!r} is {shown}: expected shape {expected}, as in like")
        leaves[index] = g if index not in leaves or g is leaves[index] else leaves[index] + g
    return [leaves[i] for i in range(len(leaves))]
