"""The norm of each leaf, on any layout, for layerwise optimizers."""

import math

import torch

from fzero import tree
from fzero.collectives import psum
from fzero.optim._base import at_least_float32
from fzero.sharding import Shard, check_on_device, facts, is_box, segment_ids
from fzero.tree import Tree

__all__ = ["leaf_norms", "leaf_rms"]

_LANES = 256  # partial sums of a leaf: one sum of a million float32 squares, one by one, would lose digits


def leaf_norms(values: Tree) -> Tree:
    """Return the 2-norm of each leaf of a tree, exact on any layout.

    All shards over the same axes are summed over their ranks by one psum of a vector, which has a number for each leaf.
    Replicated leaves need none, and padding does not count. Of leaves that are stacked by rank, as a pipeline's blocks
    are, each has a norm of its own. Sums run in float32 at least.

    Args:
        values: a tree, whole or cut; or several in a tuple, which then share the psum.

    Returns:
        A tree like `values`: for a plain leaf its norm, 0-d; in a box a tensor `[k]`, the norm of each element's leaf
        (0 in the padding). Of the leaves' dtype, or float32 for less.

    Example:
        >>> import fzero
        >>> tree = {"w": torch.tensor([3.0, 4.0, 0.0]), "b": torch.tensor(-2.0)}
        >>> leaf_norms(tree)
        {'w': tensor(5.), 'b': tensor(2.)}
        >>> fzero.mesh(dp=2).spmd(lambda t: leaf_norms(fzero.partition(t)))(tree)["w"].data
        tensor([[5., 5.],
                [5., 0.]])
    """
    return _leaf_norms(values, mean=False)


def leaf_rms(values: Tree) -> Tree:
    """Return the root mean square of each leaf of a tree (of an empty one, 0), as `leaf_norms` does the norm."""
    return _leaf_norms(values, mean=True)


def _leaf_norms(values: Tree, mean: bool) -> Tree:
    entries, structure = tree.flatten(values, is_box)
    sums: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}  # axes -> position of a box -> [leaves of its unit]
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            apart = [s.axis for s in facts(x.uid).split if s.stacked]  # along which each rank has leaves of its own
            axes = tuple([name for name in facts(x.uid).varies if name not in apart])
            sums.setdefault(axes, {})[position] = _sums_of_squares(x)
    out = list(entries)
    for axes, own in sums.items():
        totals = psum(torch.cat(list(own.values())), axes).split([len(s) for s in own.values()])
        for (position, s), total in zip(own.items(), totals, strict=True):
            x = entries[position]
            n = math.prod([s.size for s in facts(x.uid).split if not s.stacked])  # ranks that have parts of the leaf
            sizes = [max(n * math.prod(shape), 1) if mean else 1 for shape in facts(x.uid).shapes]
            squares = total.to(s.dtype) / torch.tensor(sizes, device=s.device)
            table = torch.cat([squares.sqrt(), s.new_zeros(1)])
            out[position] = Shard(table[segment_ids(x.uid, x.data.device)], x.uid)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (at_least_float32(x).square().sum() / (max(x.numel(), 1) if mean else 1)).sqrt()

    whole = tree.unflatten(structure, [None if is_box(x) else x for x in entries])
    plain = tree.flatten(tree.map(norm, whole))[0]
    return tree.unflatten(structure, [x if is_box(x) else y for x, y in zip(out, plain, strict=True)])


def _sums_of_squares(box: Shard) -> torch.Tensor:
    """Return the sum of squares of this rank's part of each leaf of a unit: `[leaves]`."""
    check_on_device(box, "a norm of leaves")
    squares, rows = at_least_float32(box.data).square(), len(facts(box.uid).shapes) + 1  # the last row: padding
    lane = torch.arange(len(squares), device=squares.device) % _LANES
    bins = segment_ids(box.uid, squares.device) * _LANES + lane
    return squares.new_zeros(rows * _LANES).index_add(0, bins, squares).view(rows, _LANES).sum(1)[:-1]
