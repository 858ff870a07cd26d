"""What of a tree is not finite: by leaf and rank, those in boxes too."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.debug._watch import kind_of
from fzero.layout.boxes import PerRank, Shard, axes_of, is_box
from fzero.layout.spec import facts
from fzero.layout.stacked import own_path, prefix_of
from fzero.ranks.mesh import Mesh

__all__ = ["NonFiniteLeaf", "nonfinite_parts"]


class NonFiniteLeaf(NamedTuple):
    """A leaf, or some ranks' part of one, that is not finite: its path, its value, and these ranks."""

    path: str
    value: torch.Tensor
    ranks: tuple[int, ...]


def nonfinite_parts(values: Any, mesh: Mesh | None) -> Iterator[NonFiniteLeaf]:
    """List the leaves of a step's arguments, or results, that are not finite."""
    everywhere = (0,) if mesh is None else (mesh.rank,) if mesh.distributed else tuple(range(mesh.size))
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    for path, x in zip(paths, entries, strict=True):
        if not is_box(x):
            found = [NonFiniteLeaf(path, x, everywhere)] if isinstance(x, torch.Tensor) else []
        elif mesh is None:  # boxes of a program's own ranks
            found = [NonFiniteLeaf(path, y, ()) for y in tree.tensors(x)]
        else:
            found = _parts(path, x, mesh)
        yield from [part for part in found if kind_of(part.value)]


def _parts(path: str, box: Any, mesh: Mesh) -> Iterator[NonFiniteLeaf]:
    """List the parts of a box by leaf and rank; in a simulation they are stacked."""
    paths, leaves, _ = tree.flatten_with_paths(box)
    for inner, x, axes in zip(paths, leaves, axes_of(box, mesh.axis_names), strict=True):
        if not isinstance(x, torch.Tensor) or not kind_of(x):
            continue
        # the path in a box begins with the place of its only child
        place = (
            ".".join([name for name in (path, inner.partition(".")[2]) if name]) if isinstance(box, PerRank) else path
        )
        ranks = [mesh.rank] if mesh.distributed else range(mesh.size)
        placed = [(_row(mesh, axes, rank), rank) for rank in ranks]
        for row, group in itertools.groupby(sorted(placed), key=lambda item: item[0]):
            mine = tuple([rank for _, rank in group])
            part = x if mesh.distributed or not axes else x[row]
            if isinstance(box, Shard):
                part, place = _in_unit(path, box, part, mesh, mine[0])
            yield NonFiniteLeaf(place, part, mine)


def _row(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return a rank's place along axes, the first the slowest."""
    sizes, place = dict(mesh.shape), 0
    here = dict(zip(mesh.axis_names, mesh.coordinates(rank), strict=True))
    for name in axes:
        place = place * sizes[name] + here[name]
    return place


def _in_unit(path: str, box: Shard, x: torch.Tensor, mesh: Mesh, rank: int) -> tuple[torch.Tensor, str]:
    """Return a shard without its padding, and the path of the leaf that its first non-finite element belongs to."""
    known, paths = facts(box.uid), box.spec.paths
    start = _row(mesh, known.axes, rank) * known.shard_numel
    x = x[..., : max(known.numel - start, 0)]
    if not kind_of(x):
        return x, path
    first = start + int((~torch.isfinite(x)).flatten().nonzero()[0])
    index = sum([stop <= first for stop in known.offsets[1:]])
    prefix = prefix_of(path, paths[0])
    if prefix is None:
        return x, path
    places = dict(zip(mesh.axis_names, mesh.coordinates(rank), strict=True))
    return x, own_path(box.spec, index, prefix, places)
