"""One rank's view of a step: a mesh whose processes are not at hand, and trees as one of them holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from fzero import tree
from fzero._torch import in_buffers
from fzero.axes import PLANNED
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, Slot, Spec, box_of, intern, is_box, spec_of
from fzero.tree import Tree

__all__ = ["Shape", "absent", "as_one_rank_holds"]

Shape = tuple[tuple[str, int], ...]


def absent(shape: Shape, places: Shape = ()) -> Mesh:
    """Return a mesh of processes that are not at hand, as one of them sees it: enough to trace a step on it.

    Args:
        shape: the name and size of each axis.
        places: of the one along axes; 0 along those left out.
    """
    names = [name for name, _ in shape]
    joint = [",".join(chosen) for k in range(2, len(names) + 1) for chosen in combinations(names, k)]
    return Mesh(shape, _Processes(places=places), tuple([(axes, f"{PLANNED}{axes}") for axes in joint]))


@dataclass(frozen=True)
class _Processes:
    """Answers for a `DeviceMesh` of processes that are not at hand, and for the groups of its axes."""

    group_name: str = ""
    places: Shape = ()

    def get_local_rank(self, name: str) -> int:
        """Return the rank along an axis."""
        return dict(self.places).get(name, 0)

    def get_group(self, name: str) -> "_Processes":
        """Return the group of an axis, of which a trace asks the name alone."""
        return _Processes(f"{PLANNED}{name}")


def as_one_rank_holds(values: Tree, sizes: Mapping[str, int], stacked: bool) -> Tree:
    """Return a tree as one rank of another mesh would hold it, in meta tensors, however it is cut now.

    Shards become those of a cut over the other mesh. A `PerRank` value becomes one rank's part, as large as it is now.

    Args:
        values: a tree that may hold boxes.
        sizes: of the other mesh's axes.
        stacked: whether the boxes hold the pieces of all ranks, `[N, ...]`, as those of a simulated mesh do.

    Raises:
        ValueError: if an axis that splits leaves does not divide them on the other mesh. Names the leaf.
    """

    def meta(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")

    whole = {id(x): x for x in tree.flatten(values, is_box)[0] if isinstance(x, torch.Tensor)}
    metas = dict(zip(whole, in_buffers([*whole.values()], meta), strict=True))

    def convert(x: Any) -> Any:
        if isinstance(x, PerRank):
            own = tree.map(lambda v: v.new_empty(v.shape[1:] if stacked else v.shape, device="meta"), x.value)
            return PerRank(own, x.axes)
        if isinstance(x, Shard | Slot):
            uid = intern(_cut_for(x.spec, sizes))
            if isinstance(x, Slot):
                return Slot(uid, x.index)
            like = x.parts[0]
            return box_of(uid, [like.new_empty(p.stop - p.start, device="meta") for p in spec_of(uid).pieces])
        return metas[id(x)] if isinstance(x, torch.Tensor) else x

    return tree.map(convert, values, is_leaf=is_box)


def _cut_for(spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """Return the spec of the same unit on a mesh of other sizes, of which a rank has another part of split leaves."""
    shapes = [list(shape) for shape in spec.shapes]
    for s in spec.split:
        n = sizes[s.axis]
        for path, shape, dim in zip(spec.paths, shapes, s.dims, strict=True):
            whole = shape[dim] * s.size
            if whole % n:
                raise ValueError(
                    f"world_size: {s.axis!r} splits dimension {dim} of leaf {path!r} of size {whole}, "
                    f"and {whole} does not divide by {n}; take another size"
                )
            shape[dim] = whole // n
    return replace(
        spec,
        mesh=tuple((name, sizes[name]) for name in spec.axes),
        split=tuple([s._replace(size=sizes[s.axis]) for s in spec.split]),
        shapes=tuple([tuple(shape) for shape in shapes]),
    )
