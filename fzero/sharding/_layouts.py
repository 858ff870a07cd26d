"""layouts: show the layout of each leaf of a tree, as a table."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero import tree
from fzero._format import format_tensor
from fzero._report import Report
from fzero._tracebacks import api_boundary
from fzero.sharding._boxes import PerRank, Shard, Slot, is_box
from fzero.sharding._spec import Split
from fzero.sharding._stacked_items import find_item
from fzero.tree import Tree

__all__ = ["Layouts", "layouts"]


class _LeafLayout(NamedTuple):
    """The layout of one leaf.

    Attributes:
        path: the leaf's path in the tree.
        shape: the shape of the full leaf; for a PerRank value, the shape of its tensor.
        dtype: the dtype of its elements.
        layout: the layout in words, such as "replicated", or "unit 'blocks.0' over dp=4: 18 of 72 elements".
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str


@dataclass(frozen=True)
class Layouts(Report):
    """The layouts of a tree's leaves, returned by `fzero.sharding.layouts`. `print` or a notebook shows the table."""

    leaves: tuple[_LeafLayout, ...]

    def __str__(self) -> str:
        rows = [(x.path or "(the tree)", _shape_text(x), x.layout) for x in self.leaves]
        widths = [max([len(row[i]) for row in rows], default=0) for i in range(2)]
        return "\n".join([f"{path:<{widths[0]}}  {leaf:<{widths[1]}}  {layout}" for path, leaf, layout in rows])

    __repr__ = __str__


@api_boundary
def layouts(values: Tree) -> Layouts:
    """List the layout of each leaf of a tree: replicated, sharded in a unit over axes, or different by rank.

    Args:
        values: a tree of plain tensors and boxes, such as parameters or an optimizer state.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=2)
        >>> sharded = mesh.spmd(fzero.partition)({"block": {"w": torch.ones(4, 2), "b": torch.ones(3)}})
        >>> fzero.sharding.layouts({**sharded, "step": torch.tensor(1)})
        block.w  float32 [4, 2]  unit 'block' over dp=2: 6 of 11 elements
        block.b  float32 [3]     in unit 'block'
        step     int64 []        replicated
    """
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    leaves: list[_LeafLayout] = []
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            spec = x.spec
            axes = ", ".join([f"{name}={size}" for name, size in spec.sharded_over]) or "no axis"
            parts = "".join([f", {_describe_split(s, spec.paths[0])}" for s in spec.split])
            host = sum([p.stop - p.start for p in spec.pieces if p.space == "host"])
            layout = f"unit {spec.unit!r} over {axes}{parts}: {spec.shard_numel} of {spec.numel} elements"
            layout += f", {host} of them on the host" if host else ""
            leaves.append(_LeafLayout(path, tuple(x.shape), x.dtype, layout))
        elif isinstance(x, Slot):
            leaves.append(_LeafLayout(path, tuple(x.shape), x.dtype, f"in unit {x.spec.unit!r}"))
        elif isinstance(x, PerRank):
            layout = "differs by rank" + (f" along {', '.join(x.axes)}" if x.axes else "")
            leaves += [_LeafLayout(path, tuple(y.shape), y.dtype, layout) for y in tree.tensors(x)]
        elif isinstance(x, torch.Tensor):
            leaves.append(_LeafLayout(path, tuple(x.shape), x.dtype, "replicated"))
    return Layouts(tuple(leaves))


def _describe_split(s: Split, path: str) -> str:
    """Describe what each rank holds along an axis: a part of each leaf, or the leaves of one item of a list."""
    item = find_item(path, "", s.stacked) if s.stacked else None
    if item is None:
        return f"part of {s.axis}={s.size}"
    items = ["none" if n is None else f"{item.list_path}.{n}" for n in item.indices]
    return f"stacked over {s.axis}={s.size} ({', '.join(items)})"


def _shape_text(leaf: _LeafLayout) -> str:
    return format_tensor(leaf.dtype, leaf.shape)
