"""Filling a layout with whole leaves: each is put into its place and forgotten, so no rank needs all at once."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.init._deferred import Deferred
from fzero.init._given import LeafSupply
from fzero.layout.boxes import box_of, is_box
from fzero.layout.elements import elements
from fzero.layout.pieces import spaces
from fzero.layout.spec import Spec, spec_of
from fzero.layout.units import cut_units
from fzero.ranks.agreement import check_alike, check_equal, checksum
from fzero.ranks.mesh import Mesh

__all__ = ["build"]


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
