"""One rank's view of a step in a planned world: a mesh without processes, and trees as one rank holds them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from fzero import tree
from fzero._torch import in_buffers
from fzero.axes import PLANNED
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, Slot, Spec, intern, is_box, lookup_spec, make_box
from fzero.tree import Tree

__all__ = ["Shape", "one_rank_tree", "planned_mesh"]

Shape = tuple[tuple[str, int], ...]


def planned_mesh(shape: Shape, coordinates: Shape = ()) -> Mesh:
    """Return a mesh without processes, as one of its ranks sees it. A step can be traced on it.

    Args:
        shape: the name and size of each axis.
        coordinates: the rank's coordinate along each axis; 0 along an axis that is left out.
    """
    names = [name for name, _ in shape]
    joint = [",".join(subset) for k in range(2, len(names) + 1) for subset in combinations(names, k)]
    device_mesh = _PlannedDeviceMesh(coordinates=coordinates)
    return Mesh(shape, device_mesh, tuple([(axes, f"{PLANNED}{axes}") for axes in joint]))


@dataclass(frozen=True)
class _PlannedDeviceMesh:
    """A stand-in for the `DeviceMesh` of a world without processes, and for the groups of its axes."""

    group_name: str = ""
    coordinates: Shape = ()

    def get_local_rank(self, name: str) -> int:
        """Return the rank along an axis."""
        return dict(self.coordinates).get(name, 0)

    def get_group(self, name: str) -> "_PlannedDeviceMesh":
        """Return the group of an axis. A trace reads only the group's name."""
        return _PlannedDeviceMesh(f"{PLANNED}{name}")


def one_rank_tree(values: Tree, sizes: Mapping[str, int], all_ranks: bool) -> Tree:
    """Return a tree as one rank of another mesh would hold it, in meta tensors, however it is sharded now.

    Units are sharded anew over the other mesh. A `PerRank` value becomes one rank's part, of the same size as now.

    Args:
        values: a tree that may hold boxes.
        sizes: the sizes of the other mesh's axes.
        all_ranks: whether boxes hold the values of all ranks, `[N, ...]`, as on a simulated mesh.

    Raises:
        ValueError: if an axis that splits leaves does not divide a leaf on the other mesh. The message names the leaf.
    """

    def meta(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")

    tensors = {id(x): x for x in tree.flatten(values, is_box)[0] if isinstance(x, torch.Tensor)}
    metas = dict(zip(tensors, in_buffers([*tensors.values()], meta), strict=True))

    @functools.cache  # a unit of many leaves has one spec, in which each leaf has a row
    def convert_spec(spec_id: int) -> int:
        return intern(_spec_on_mesh(lookup_spec(spec_id), sizes))

    def convert(x: Any) -> Any:
        if isinstance(x, PerRank):
            part = tree.map(lambda v: v.new_empty(v.shape[1:] if all_ranks else v.shape, device="meta"), x.value)
            return PerRank(part, x.axes, x.split)
        if isinstance(x, Shard | Slot):
            spec_id = convert_spec(x.spec_id)
            if isinstance(x, Slot):
                return Slot(spec_id, x.index)
            like = x.pieces[0]
            pieces = [like.new_empty(p.stop - p.start, device="meta") for p in lookup_spec(spec_id).pieces]
            return make_box(spec_id, pieces)
        return metas[id(x)] if isinstance(x, torch.Tensor) else x

    return tree.map(convert, values, is_leaf=is_box)


def _spec_on_mesh(spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """Return the spec of the same unit on a mesh of other sizes, where split leaves have parts of other sizes."""
    shapes = [list(shape) for shape in spec.shapes]
    for s in spec.split:
        n = sizes[s.axis]
        for path, shape, dim in zip(spec.paths, shapes, s.dims, strict=True):
            size = shape[dim] * s.size
            if size % n:
                raise ValueError(
                    f"world_size: {s.axis!r} splits dimension {dim} of leaf {path!r} of size {size}, "
                    f"and {size} does not divide by {n}; take another size"
                )
            shape[dim] = size // n
    return replace(
        spec,
        sharded_over=tuple((name, sizes[name]) for name in spec.axes),
        split=tuple([s._replace(size=sizes[s.axis]) for s in spec.split]),
        shapes=tuple([tuple(shape) for shape in shapes]),
    )
