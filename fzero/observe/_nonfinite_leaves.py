"""The non-finite leaves of a tree, by leaf and rank, also inside of boxes."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.observe._nonfinite_tracker import nonfinite_kind
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, is_box, leaf_axes, path_on_rank, subtree_prefix, traced_spec

__all__ = ["nonfinite_leaves"]


class _NonFiniteLeaf(NamedTuple):
    """A non-finite leaf, or a part of one: its path, its value, and the ranks that hold it."""

    path: str
    value: torch.Tensor
    ranks: tuple[int, ...]


def nonfinite_leaves(values: Any, mesh: Mesh | None) -> Iterator[_NonFiniteLeaf]:
    """Yield the non-finite leaves of a step's arguments or results."""
    local_ranks = (0,)
    if mesh is not None:
        local_ranks = (mesh.rank,) if mesh.distributed else tuple(range(mesh.size))
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    for path, x in zip(paths, entries, strict=True):
        if not is_box(x):
            leaves = [_NonFiniteLeaf(path, x, local_ranks)] if isinstance(x, torch.Tensor) else []
        elif mesh is None:  # boxes of ranks that the user's program runs itself
            leaves = [_NonFiniteLeaf(path, y, ()) for y in tree.tensors(x)]
        else:
            leaves = _nonfinite_leaves_of_box(path, x, mesh)
        yield from [part for part in leaves if nonfinite_kind(part.value)]


def _nonfinite_leaves_of_box(path: str, box: Any, mesh: Mesh) -> Iterator[_NonFiniteLeaf]:
    """Yield the non-finite parts of a box, by leaf and rank. In a simulation they are stacked."""
    paths, leaves, _ = tree.flatten_with_paths(box)
    for inner, x, axes in zip(paths, leaves, leaf_axes(box, mesh.axis_names), strict=True):
        if not isinstance(x, torch.Tensor) or not nonfinite_kind(x):
            continue
        # the first part of a path in a box is that of its only child
        leaf_path = (
            ".".join([name for name in (path, inner.partition(".")[2]) if name]) if isinstance(box, PerRank) else path
        )
        ranks = [mesh.rank] if mesh.distributed else range(mesh.size)
        rows = [(mesh.index(axes, rank) if axes else 0, rank) for rank in ranks]
        for row, pairs in itertools.groupby(sorted(rows), key=lambda item: item[0]):
            group_ranks = tuple([rank for _, rank in pairs])
            part = x if mesh.distributed or not axes else x[row]
            if isinstance(box, Shard):
                part, leaf_path = _locate_in_unit(path, box, part, mesh, group_ranks[0])
            yield _NonFiniteLeaf(leaf_path, part, group_ranks)


def _locate_in_unit(path: str, box: Shard, x: torch.Tensor, mesh: Mesh, rank: int) -> tuple[torch.Tensor, str]:
    """Return a shard without its padding, and the path of the leaf with its first non-finite element."""
    unit, paths = traced_spec(box.spec_id), box.spec.paths
    start = (mesh.index(unit.axes, rank) if unit.axes else 0) * unit.shard_numel
    x = x[..., : max(unit.numel - start, 0)]
    if not nonfinite_kind(x):
        return x, path
    first = start + int((~torch.isfinite(x)).flatten().nonzero()[0])
    index = sum([stop <= first for stop in unit.offsets[1:]])
    prefix = subtree_prefix(path, paths[0])
    if prefix is None:
        return x, path
    coordinates = dict(zip(mesh.axis_names, mesh.coordinates(rank), strict=True))
    return x, path_on_rank(box.spec, index, prefix, coordinates)
