"""The part of a tree that this process holds: the tree's layout, and the tensor that each piece of a leaf lies in."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.checkpoint.layout._chunks import ChunkRange
from fzero.checkpoint.layout._json_values import is_json
from fzero.checkpoint.layout._ranges import Leaf, LeafGroup, LeafPiece, TreeLayout
from fzero.checkpoint.layout._safetensors import SAFETENSORS_NAMES
from fzero.checkpoint.layout._unit_parts import LeafSource, UnitPart, in_tree_order, list_unit_parts
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, Spec, check_sharded_for, is_box, sharded_units

__all__ = ["LocalPiece", "LocalTree", "PlainMemory", "is_entry", "local_tree"]


class LocalPiece(NamedTuple):
    """A piece of a leaf that a rank holds, and where it lies in memory.

    Attributes:
        piece: the piece.
        tensor: the tensor that holds it.
        offset: where it begins in `tensor`, in elements.
    """

    piece: LeafPiece
    tensor: torch.Tensor
    offset: int


@dataclass(frozen=True)
class LocalTree:
    """The part of a tree that this process holds.

    Attributes:
        layout: the layout of the tree.
        ranks: the ranks that run in this process: one, or all ranks of a simulation.
        memory: the memory of each group. A box has `[rows, k]`, with one row per rank along its axes; plain leaves are
            their own memory.
        sources: the source in the tree of each leaf and value, by path. The order is that of the full tree, which does
            not depend on the layout.
    """

    layout: TreeLayout
    ranks: range
    memory: tuple["_BoxMemory | PlainMemory", ...]
    sources: dict[str, LeafSource]

    def local_pieces(self, rank: int) -> Iterator[LocalPiece]:
        """List the pieces that a rank holds, each with its memory."""
        return self._locate_pieces(self.layout.local_pieces(rank), rank)

    def owned_pieces(self, rank: int) -> Iterator[LocalPiece]:
        """List the pieces that a rank writes, in file order, each with its memory."""
        return self._locate_pieces(self.layout.owned_pieces(rank), rank)

    def _locate_pieces(self, pieces: Iterator[LeafPiece], rank: int) -> Iterator[LocalPiece]:
        for piece in pieces:
            yield from self.memory[piece.group].locate(self.layout, piece, rank)


@dataclass(frozen=True)
class _BoxMemory:
    """A value in a box: one rank's, or all ranks' in a simulation.

    Attributes:
        pieces: tensors `[rows, k]`, or `[rows, ...]` of a `PerRank` value. A shard in two pieces has two, in order.
        axes: the axes along which the rows differ, in mesh order; empty if the rank is a process.
    """

    pieces: tuple[torch.Tensor, ...]
    axes: tuple[str, ...]

    def locate(self, layout: TreeLayout, piece: LeafPiece, rank: int) -> Iterator[LocalPiece]:
        """Yield where a rank's piece lies: in one tensor, or perhaps in both tensors of a shard in two pieces."""
        row = layout.index(self.axes, rank)
        if len(self.pieces) == 1:
            yield LocalPiece(piece, self.pieces[0][row], piece.offset)
            return
        tensor_start, (chunk, start, _) = 0, piece.range
        for x in self.pieces:
            a, b = max(piece.offset, tensor_start), min(piece.offset + piece.numel, tensor_start + x.shape[-1])
            if a < b:
                chunk_range = ChunkRange(chunk, start + a - piece.offset, start + b - piece.offset)
                yield LocalPiece(piece._replace(range=chunk_range, offset=a), x[row], a - tensor_start)
            tensor_start += x.shape[-1]

    def tensors(self) -> list[torch.Tensor]:
        """List the tensors of the box."""
        return list(self.pieces)


@dataclass(frozen=True)
class PlainMemory:
    """Leaves that each rank holds in full."""

    leaves: dict[int, torch.Tensor]

    def locate(self, layout: TreeLayout, piece: LeafPiece, rank: int) -> Iterator[LocalPiece]:
        """Yield where a rank's piece lies."""
        yield LocalPiece(piece, self.leaves[piece.leaf], piece.range.start)

    def tensors(self) -> list[torch.Tensor]:
        """List the leaves."""
        return list(self.leaves.values())


def is_entry(x: Any) -> bool:
    """Return whether a checkpoint treats a node of a tree as a leaf: a box, or a dict or list of JSON."""
    return is_box(x) or (type(x) in (dict, list) and is_json(x))


def local_tree(label: str, values: Any, mesh: Mesh | None) -> LocalTree:
    """Return the part of a tree that this process holds.

    Args:
        label: the name of the tree in messages.
        values: the tree, in any layout.
        mesh: the ranks; None for a tree without boxes, in one process.

    Raises:
        ValueError: if two leaves have one path, or a box was sharded for another mesh. The message names the path.
        TypeError: if a checkpoint cannot hold a leaf. The message names its path.
    """
    shape = () if mesh is None else mesh.shape
    builder = _LocalTreeBuilder(label, shape, mesh is None or mesh.simulated)
    paths, entries, _ = tree.flatten_with_paths(values, is_entry)
    for unit in sharded_units(paths, entries):
        _check_mesh(label, paths[unit.members[0][0]], unit.spec_id, shape)
        builder.add_unit([(paths[position], index) for position, index in unit.members], unit.shard)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, PerRank):
            builder.add_per_rank(path, x)
        elif isinstance(x, torch.Tensor):
            builder.add_plain(path, x)
        elif not is_box(x):
            if not is_json(x):
                raise TypeError(
                    f"{label} leaf {path!r} is {str(x)[:80]!r} of type {type(x).__name__}, which a checkpoint cannot "
                    "hold: expected a tensor, or a JSON value (a number, text, None, dicts and lists of these)"
                    + "".join([f"; {hint}" for hint in [getattr(x, "save_hint", "")] if hint])
                )
            builder.add_value(path, x)
    ranks = range(mesh.rank, mesh.rank + 1) if mesh is not None and not mesh.simulated else range(builder.size)
    return builder.build(ranks, paths)


def _check_mesh(label: str, path: str, spec_id: int, shape: tuple[tuple[str, int], ...]) -> None:
    if not shape:
        raise ValueError(f"{label} leaf {path!r} is in a box: give the mesh that it was sharded for, mesh=step.mesh")
    check_sharded_for(spec_id, f"{label} leaf {path!r}", shape)


class _LocalTreeBuilder:
    """Collects the leaves and groups of a tree."""

    def __init__(self, label: str, mesh: tuple[tuple[str, int], ...], is_simulated: bool) -> None:
        self.label, self.mesh, self.is_simulated = label, mesh, is_simulated
        self.leaves: list[Leaf] = []
        self.groups: list[LeafGroup] = []
        self.memory: list[_BoxMemory | PlainMemory] = []
        self.ties: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.sources: dict[str, LeafSource] = {}
        self.first_paths: dict[int, str] = {}  # id of a plain leaf -> its first path
        self.plain: dict[torch.dtype, dict[int, torch.Tensor]] = {}
        self.size = TreeLayout(mesh=mesh, leaves=(), groups=(), ties={}, values={}).ranks

    def _add_leaf(
        self,
        path: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        per_rank: bool = False,
        source: LeafSource | None = None,
    ) -> int:
        if dtype not in SAFETENSORS_NAMES:
            raise TypeError(f"{self.label} leaf {path!r} has dtype {dtype}, which a checkpoint cannot hold")
        self._add_path(path, source)
        self.leaves.append(Leaf(path, tuple([int(n) for n in shape]), dtype, per_rank))
        return len(self.leaves) - 1

    def _add_path(self, path: str, source: LeafSource | None = None) -> None:
        if path in self.sources:
            raise ValueError(
                f"{self.label} has two leaves of the path {path!r}: a dot in a key separates parts of a path; rename "
                "the key"
            )
        self.sources[path] = source or LeafSource(path)

    def _add_tie(self, path: str, first: str, source: LeafSource | None = None) -> None:
        self._add_path(path, source)
        self.ties[path] = first

    def add_value(self, path: str, value: Any) -> None:
        self._add_path(path)
        self.values[path] = copy.deepcopy(value)  # the user may change it while a save is under way

    def add_unit(self, members: Sequence[tuple[str, int]], shard: Shard) -> None:
        """Add a unit's groups to the layout, one for all its leaves that are split alike, with the shard's memory."""
        spec: Spec = shard.spec
        indices = {index for _, index in members}
        absent_paths = [path for index, path in enumerate(spec.paths) if index not in indices]
        if absent_paths:
            raise ValueError(
                f"{self.label} has only part of unit {spec.unit!r}, without leaf {absent_paths[0]!r}: give the whole "
                "unit"
            )
        axes = tuple([name for name, _ in self.mesh if name in spec.varies]) if self.is_simulated else ()
        memory = _BoxMemory(tuple([x if axes else x[None] for x in shard.pieces]), axes)
        parts = list_unit_parts(self.label, spec, members)
        indices = [self._add_members(part, shard.dtype) for part in parts]
        index_by_path = {self.leaves[i].path: i for leaf_indices in indices for i in leaf_indices.values()}
        for part, leaf_indices in zip(parts, indices, strict=True):
            copy_paths = {m.index: index_by_path[m.path] for m in part.members if m.is_copy}
            leaves = tuple([leaf_indices[i] if i in leaf_indices else copy_paths[i] for i in range(len(spec.paths))])
            copies = tuple(sorted(copy_paths))
            self.groups.append(
                LeafGroup(
                    leaves=leaves,
                    axes=spec.axes,
                    shard_numel=spec.shard_numel,
                    split=part.split,
                    coordinates=part.coordinates,
                    copies=copies,
                )
            )
            self.memory.append(memory)

    def _add_members(self, part: UnitPart, dtype: torch.dtype) -> dict[int, int]:
        """Add the leaves of a part of a unit, and return the index of each leaf by its index in the unit."""
        indices: dict[int, int] = {}
        for m in part.members:
            if m.is_copy:
                continue
            if m.index in indices:
                self._add_tie(m.path, self.leaves[indices[m.index]].path, m.source)
            else:
                indices[m.index] = self._add_leaf(m.path, part.shapes[m.index], dtype, source=m.source)
        return indices

    def add_per_rank(self, path: str, box: PerRank) -> None:
        """Add each tensor of a `PerRank` box as a leaf that has one row for each rank."""
        names = [name for name, _ in self.mesh]
        axes = tuple(names) if box.axes is None else tuple([name for name in names if name in box.axes])
        n = TreeLayout(mesh=self.mesh, leaves=(), groups=(), ties={}, values={}).size(axes)
        paths, values, _ = tree.flatten_with_paths(box.value)
        for sub, x in zip(paths, values, strict=True):
            name = f"{path}.{sub}" if sub else path
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{self.label} leaf {name!r} is {x!r} in a PerRank box: expected a tensor")
            shape = x.shape if self.is_simulated else (n, *x.shape)
            numel = x.numel() // n if self.is_simulated else x.numel()
            i = self._add_leaf(name, shape, x.dtype, per_rank=True, source=LeafSource(path))
            self.groups.append(LeafGroup((i,), axes, numel))
            self.memory.append(_BoxMemory((x,), axes) if self.is_simulated else _BoxMemory((x[None],), ()))

    def add_plain(self, path: str, x: torch.Tensor) -> None:
        if x.layout != torch.strided or x.is_quantized or hasattr(type(x), "__tensor_flatten__"):
            raise TypeError(f"{self.label} leaf {path!r} is a {type(x).__name__}: expected a dense tensor")
        if id(x) in self.first_paths:
            self._add_tie(path, self.first_paths[id(x)])
            return
        self.first_paths[id(x)] = path
        i = self._add_leaf(path, x.shape, x.dtype)
        self.plain.setdefault(x.dtype, {})[i] = x

    def build(self, ranks: range, paths: Sequence[str]) -> LocalTree:
        for leaves in self.plain.values():  # concatenated, so that each rank writes one long range of them
            numel = sum(x.numel() for x in leaves.values())
            self.groups.append(LeafGroup(tuple(leaves), (), numel))
            self.memory.append(PlainMemory(leaves))
        layout = TreeLayout(
            mesh=self.mesh, leaves=tuple(self.leaves), groups=tuple(self.groups), ties=self.ties, values=self.values
        )
        return LocalTree(layout, ranks, tuple(self.memory), in_tree_order(self.sources, paths))
