"""Fill a layout with full leaves, one by one, so that no rank needs all of them at once."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import view_of
from fzero.ranks import Mesh, check_alike, check_equal, checksum
from fzero.sharding import CutUnit, Shard, Slot, Spec, box_of, cut_units, elements, is_box, spaces, spec_of
from fzero.zero._source import Deferred, LeafSupply, given

__all__ = ["build", "given_like", "lay_side_by_side"]

# Filling a layout with whole leaves: each is put into its place and forgotten, so no rank needs all at once.


def build(what: str, source: LeafSupply | Deferred, layout: Any, mesh: Mesh) -> Any:
    """Put the leaves of a tree into a layout.

    What is alive at any time, besides what others hold of the leaves: the boxes, one leaf, and what it is made from.

    Args:
        what: what the tree is called in messages.
        source: the leaves. What is no tensor is taken over.
        layout: the tree with boxes in place of the leaves that are cut, whatever these boxes hold.
        mesh: whose ranks they are; in a simulation all ranks' shards are made.

    Returns:
        The tree in the layout, in memory of its own.

    Raises:
        ValueError: on all ranks, if a leaf is not the same on all; if leaves of one unit are on several devices. Names
            the leaf.
    """
    if isinstance(source, LeafSupply):  # before any of it is given up
        check_equal(what, tree.unflatten(source.structure, source.held), mesh)
    else:
        check_alike(what, tree.unflatten(source.structure, source.leaves), mesh)
    filling = _Filling(what, layout, source, mesh)
    sums: list[Any] = [None] * len(source.leaves)

    def take(positions: list[int], leaf: torch.Tensor, may_keep: bool) -> None:
        if mesh.distributed and isinstance(source, Deferred):
            total = checksum(leaf)
            for i in positions:
                sums[i] = total
        filling.take(positions, leaf, may_keep)

    source.run(take)
    if isinstance(source, Deferred):
        check_equal(what, tree.unflatten(source.structure, source.leaves), mesh, sums)
    return filling.tree()


class _Home(NamedTuple):
    """Where a leaf belongs: in its unit's shard, or in all ranks' shards, those of the rows of `parts`.

    Attributes:
        parts: the shard, `[k]`, of two pieces both; in a simulation `[N, k]`.
        spec: how the unit is cut.
        index: the leaf's place in the unit.
        ranks: of each row a rank whose shard it is.
    """

    parts: tuple[torch.Tensor, ...]
    spec: Spec
    index: int
    ranks: tuple[int, ...]

    def store(self, leaf: torch.Tensor, mesh: Mesh) -> None:
        """Copy into each shard its own elements of a whole leaf."""
        k, index = self.spec.shard_numel, self.index
        offset, size = self.spec.offsets[index], self.spec.sizes[index]
        for x, piece in zip(self.parts, self.spec.pieces, strict=True):
            for row, rank in zip(x.view(-1, x.shape[-1]) if x.numel() else (), self.ranks, strict=False):
                start = (mesh.index(self.spec.axes, rank) * k if self.spec.axes else 0) + piece.start
                first, last = max(start, offset), min(start + x.shape[-1], offset + size)
                if first < last:
                    part = self._part(leaf, mesh, rank)
                    row[first - start : last - start] = elements(part, first - offset, last - offset)

    def _part(self, leaf: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """View what a rank has of a leaf that is split along further axes."""
        for s in self.spec.split:
            size = leaf.shape[s.dims[self.index]] // s.size
            leaf = leaf.narrow(s.dims[self.index], mesh.index(s.axis, rank) * size, size)
        return leaf


class _Filling:
    """A layout that is being filled: its boxes, and at the places of other leaves these, once they are known."""

    def __init__(self, what: str, layout: Any, source: LeafSupply | Deferred, mesh: Mesh) -> None:
        self.mesh, devices = mesh, source.devices
        paths, self.layout, self.structure = tree.flatten_with_paths(layout, is_box)
        pairs = zip(self.layout, source.leaves, strict=True)
        self.entries = [x if isinstance(leaf, torch.Tensor) else leaf for x, leaf in pairs]
        self.homes: dict[int, _Home] = {}  # position -> where its leaf belongs
        self.copies: dict[int, torch.Tensor] = {}  # id of a leaf of the layout -> what takes its place: ties stay tied
        for uid, box, members in cut_units(paths, self.entries):
            at = [position for position, _ in members]
            _check_one_device(what, [paths[i] for i in at], [devices[i] for i in at])
            places = ["cpu" if space == "host" else devices[at[0]] for space in spaces(box)]
            made = [torch.zeros(x.shape, dtype=x.dtype, device=to) for x, to in zip(box.parts, places, strict=True)]
            self.entries[at[0]] = box_of(uid, made)
            for position, index in members:
                self.homes[position] = _Home(tuple(made), spec_of(uid), index, _ranks_of_rows(spec_of(uid), mesh))

    def take(self, positions: list[int], leaf: torch.Tensor, may_keep: bool) -> None:
        """Put a leaf into its place, or places, if it is tied."""
        for i in positions:
            if i in self.homes:
                self.homes[i].store(leaf, self.mesh)
                continue
            before = id(self.layout[i])
            if before not in self.copies:
                self.copies[before] = leaf if may_keep and i == positions[0] else leaf.clone()
            self.entries[i] = self.copies[before]

    def tree(self) -> Any:
        """Return the tree."""
        return tree.unflatten(self.structure, self.entries)


def _ranks_of_rows(spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """List for each row of a unit's data a rank that has it."""
    if not mesh.simulated:
        return (mesh.rank,)
    names = tuple([name for name in mesh.axis_names if name in spec.varies])
    return tuple({mesh.index(names, r) if names else 0: r for r in range(mesh.size)}.values())


def _check_one_device(what: str, paths: list[str], devices: list[Any]) -> None:
    for path, device in zip(paths, devices, strict=True):
        if device != devices[0]:
            raise ValueError(
                f"{what} leaf {path!r} is on {device}, and leaf {paths[0]!r} of the same unit is on {devices[0]}: put "
                "them on one device, or give them units of their own with units="
            )


# The leaves of a unit side by side in one buffer, so that a rank's own part of them is a slice of it.


def lay_side_by_side(leaves: list[Any], cut: Any) -> None:
    """Copy the leaves of each unit into one buffer, and let each go as soon as it is there.

    What is alive beside them, if nobody else holds the leaves: one unit. Units of one leaf, and boxes, stay as they
    are.

    Args:
        leaves: of a tree of whole leaves, changed in place.
        cut: the tree in boxes, without memory, as `partition` makes it.
    """
    paths, entries, _ = tree.flatten_with_paths(cut, is_box)
    for unit in cut_units(paths, entries):
        one = {index: leaves[position] for position, index in unit.members}
        if len(one) > 1 and _are_alike(one.values()):
            one.clear()
            _fill(leaves, unit)


def _are_alike(leaves: Any) -> bool:
    """Return whether values are tensors of one dtype on one device."""
    return all(isinstance(x, torch.Tensor) for x in leaves) and len({(x.dtype, x.device) for x in leaves}) == 1


def _fill(leaves: list[Any], unit: CutUnit) -> None:
    """Put the leaves of a unit into a buffer of their own."""
    spec = spec_of(unit.uid)
    first = leaves[unit.members[0][0]]
    buffer = torch.empty(spec.numel, dtype=first.dtype, device=first.device)
    del first
    placed: dict[int, torch.Tensor] = {}
    for position, index in unit.members:
        if index not in placed:  # else it is tied
            placed[index] = view_of(buffer, spec.offsets[index], spec.shapes[index])
            placed[index].copy_(leaves[position])
        leaves[position] = placed[index]


# Whole leaves beside a cut tree of the same kind: which box each belongs to.


def given_like(what: str, values: Any, like: Any, by: str = "") -> LeafSupply:
    """Take a tree of whole leaves apart, at the places where a cut tree has its leaves and boxes.

    Args:
        what: what `values` is called in messages.
        values: the tree, as `step.gather(like)` would be.
        like: the cut tree, whatever its tensors hold.
        by: the call by which the caller gives the leaves up, if they do.

    Raises:
        ValueError: if the trees differ in structure, or a leaf has another shape or dtype than `like` says, or tied
            leaves have different values. Names the path.
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    try:
        leaves = tree.leaves_up_to(tree.unflatten(structure, [_no_box(x) for x in entries]), values, is_box)
    except ValueError as error:
        raise ValueError(f"{what} is not like like=: {error}") from error
    expected = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in entries]
    owner: list[Any] = [id(x) if isinstance(x, torch.Tensor) else None for x in entries]  # alike where leaves are tied
    for uid, box, members in cut_units(paths, entries):
        for position, index in members:
            expected[position] = (spec_of(uid).whole_shapes[index], box.dtype)
            owner[position] = (id(box), index)
    first: dict[Any, int] = {}  # owner -> position
    for i, key in enumerate(owner):
        if key is not None:
            at = first.setdefault(key, i)
            _check_tied(what, (paths[at], leaves[at]), (paths[i], leaves[i]))
    for path, x, wanted in zip(paths, leaves, expected, strict=True):
        _check_like(what, path, x, wanted)
    return given(what, tree.unflatten(structure, leaves), by)


def _no_box(x: Any) -> Any:
    """Return something that is no box for a box of leaves, in whose place a whole leaf is expected."""
    return torch.empty(0, device="meta") if isinstance(x, Shard | Slot) else x


def _check_like(what: str, path: str, x: Any, wanted: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    if wanted is None or is_box(x):  # given() says what a box does here
        return
    shape, dtype = wanted
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != wanted:
        raise ValueError(f"{what} leaf {path!r} is {tree.show(x)}, and like= says {dtype} {list(shape)}")


def _check_tied(what: str, one: tuple[str, Any], other: tuple[str, Any]) -> None:
    (path, x), (other_path, y) = one, other
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if x is not y and tensors and not (x.shape == y.shape and torch.equal(x, y)):
        raise ValueError(f"{what} leaves {path!r} and {other_path!r} are tied, and have different values")
