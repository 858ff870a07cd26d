"""Norms of leaves, on any layout."""

import math

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._torch import tensor_on
from fzero._tracebacks import api_boundary
from fzero.collectives import psum
from fzero.sharding import Shard, check_on_device, is_box, leaf_ids, traced_spec
from fzero.tree import Tree

__all__ = ["leaf_norms", "leaf_rms"]

_PARTIAL_SUMS = 256  # partial sums per leaf: adding a million float32 squares one after the other would lose digits


@api_boundary
def leaf_norms(values: Tree) -> Tree:
    """Return the 2-norm of each leaf of a tree, exact on any layout.

    One psum sums all shards over the same axes: it takes a vector with one number per leaf. Replicated leaves need no
    psum, and padding does not count. If leaves are stacked by rank, as in the blocks of a pipeline, each has its own
    norm. Sums are at least float32.

    Args:
        values: a full or sharded tree, or a tuple of several trees, which share the psum.

    Returns:
        A tree like `values`. A plain leaf becomes its norm, 0-d. A box becomes a box of a tensor `[k]` with the norm of
        each element's leaf, 0 in the padding. The dtype is that of the leaves, at least float32.

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
    """Return the root mean square of each leaf of a tree, as `leaf_norms` returns norms; 0 for an empty leaf."""
    return _leaf_norms(values, mean=True)


def _leaf_norms(values: Tree, mean: bool) -> Tree:
    """Return for each leaf its norm, or its root mean square; of a shard, for each element its leaf's norm."""
    entries, structure = tree.flatten(values, is_box)
    sums: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}  # axes -> position of a box -> [leaves of its unit]
    for position, x in enumerate(entries):
        if isinstance(x, Shard):
            # along these axes each rank has other leaves
            stacked = [s.axis for s in traced_spec(x.spec_id).split if s.stacked]
            axes = tuple([name for name in traced_spec(x.spec_id).varies if name not in stacked])
            sums.setdefault(axes, {})[position] = _sums_of_squares(x)
    out = list(entries)
    for axes, local in sums.items():
        totals = psum(torch.cat(list(local.values())), axes).split([len(s) for s in local.values()])
        for (position, s), total in zip(local.items(), totals, strict=True):
            x = entries[position]
            # the number of ranks that have parts of the leaf
            n = math.prod([s.size for s in traced_spec(x.spec_id).split if not s.stacked])
            sizes = [max(n * math.prod(shape), 1) if mean else 1 for shape in traced_spec(x.spec_id).shapes]
            squares = total.to(s.dtype) / tensor_on(sizes, device=s.device)
            table = torch.cat([squares.sqrt(), s.new_zeros(1)])
            out[position] = Shard(table[leaf_ids(x.spec_id, x.data.device)], x.spec_id)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (at_least_float32(x).square().sum() / (max(x.numel(), 1) if mean else 1)).sqrt()

    plain_leaves = tree.unflatten(structure, [None if is_box(x) else x for x in entries])
    plain = tree.flatten(tree.map(norm, plain_leaves))[0]
    return tree.unflatten(structure, [x if is_box(x) else y for x, y in zip(out, plain, strict=True)])


def _sums_of_squares(box: Shard) -> torch.Tensor:
    """Return the sum of squares of each leaf of a unit over this rank's shard: `[leaves]`."""
    check_on_device(box, "a norm of leaves")
    squares = at_least_float32(box.data).square()
    rows = len(traced_spec(box.spec_id).shapes) + 1  # the last row is padding
    column = torch.arange(len(squares), device=squares.device) % _PARTIAL_SUMS
    bins = leaf_ids(box.spec_id, squares.device) * _PARTIAL_SUMS + column
    return squares.new_zeros(rows * _PARTIAL_SUMS).index_add(0, bins, squares).view(rows, _PARTIAL_SUMS).sum(1)[:-1]
