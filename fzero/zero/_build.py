"""Fill the boxes of a template with full leaves, one after the other, so that no rank needs all of them at once."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import view_of
from fzero.ranks import Mesh, check_equal, check_same_structure, checksum, device_put
from fzero.sharding import Shard, ShardedUnit, Slot, Spec, box_of, elements, is_box, sharded_units, spaces, spec_of
from fzero.zero._source import LeafSupply, TracedInit, supply_of

__all__ = ["build", "lay_side_by_side", "supply_like"]

# Filling a template with full leaves: each leaf is copied into its unit's shard and dropped.


def build(label: str, source: LeafSupply | TracedInit, template: Any, mesh: Mesh, like: Any = None) -> Any:
    """Put the leaves of a tree into the boxes of a template, on the mesh's device.

    Leaves on the meta device stay there. At any time memory holds the boxes, one leaf, the inputs of this leaf, and
    leaves that the caller still references.

    Args:
        label: the tree's name in messages.
        source: the leaves. Values that are no tensors are copied into the result as they are.
        template: the tree with boxes in place of its sharded leaves. The contents of the boxes are not read.
        mesh: the ranks; in a simulation the boxes hold all ranks' shards.
        like: a tree of the same structure, of whose leaves without a box each device is kept; None for the mesh's.

    Returns:
        The tree with the boxes of the template, in memory of its own.

    Raises:
        ValueError: if a leaf differs between ranks (raised on all ranks), or if only some leaves of a unit have values.
            The message names the leaf.
    """
    if isinstance(source, LeafSupply):  # before the first leaf is donated
        check_equal(label, tree.unflatten(source.structure, source.tensors), mesh)
    else:
        check_same_structure(label, tree.unflatten(source.structure, source.leaves), mesh)
    filler = _Filler(label, template, source, mesh, like)
    sums: list[Any] = [None] * len(source.leaves)
    for positions, leaf, may_keep in source.run():
        if mesh.distributed and isinstance(source, TracedInit):
            total = checksum(leaf)
            for i in positions:
                sums[i] = total
        filler.take(positions, leaf, may_keep)
        del leaf  # before the source makes the next one
    if isinstance(source, TracedInit):
        check_equal(label, tree.unflatten(source.structure, source.leaves), mesh, sums)
    return filler.tree()


class _Destination(NamedTuple):
    """The destination of a leaf: its unit's shard, or in a simulation all ranks' shards.

    Attributes:
        pieces: the shard's pieces, one or two: tensors `[k]`, in a simulation `[N, k]`.
        spec: the unit's spec.
        index: the leaf's index in the unit.
        ranks: for each row of a piece, a rank that holds this row.
    """

    pieces: tuple[torch.Tensor, ...]
    spec: Spec
    index: int
    ranks: tuple[int, ...]

    def store(self, leaf: torch.Tensor, mesh: Mesh) -> None:
        """Copy the elements of a full leaf into each shard that holds some of them."""
        k, index = self.spec.shard_numel, self.index
        offset, size = self.spec.offsets[index], self.spec.sizes[index]
        for x, piece in zip(self.pieces, self.spec.pieces, strict=True):
            for row, rank in zip(x.view(-1, x.shape[-1]) if x.numel() else (), self.ranks, strict=False):
                start = (mesh.index(self.spec.axes, rank) * k if self.spec.axes else 0) + piece.start
                first, last = max(start, offset), min(start + x.shape[-1], offset + size)
                if first < last:
                    part = self._split_part(leaf, mesh, rank)
                    row[first - start : last - start] = elements(part, first - offset, last - offset)

    def _split_part(self, leaf: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """View a rank's part of a full leaf that is split along further axes."""
        for s in self.spec.split:
            size = leaf.shape[s.dims[self.index]] // s.size
            leaf = leaf.narrow(s.dims[self.index], mesh.index(s.axis, rank) * size, size)
        return leaf


class _Filler:
    """Fills the boxes of a template, and collects the leaves that are not sharded."""

    def __init__(self, label: str, template: Any, source: LeafSupply | TracedInit, mesh: Mesh, like: Any) -> None:
        self.mesh = mesh
        devices = [x if x is None or x.type == "meta" else mesh.device for x in source.devices]
        paths, self.template, self.structure = tree.flatten_with_paths(template, is_box)
        pairs = zip(self.template, source.leaves, strict=True)
        self.entries = [x if isinstance(leaf, torch.Tensor) else mesh.device_put(leaf) for x, leaf in pairs]
        # the devices of the leaves without boxes
        self.devices: list[Any] = (
            devices if like is None else list(map(_device_like, self.template, source.devices, devices))
        )
        self.destinations: dict[int, _Destination] = {}  # position -> destination of its leaf
        # id of a leaf of the template -> its replacement: tied leaves stay tied
        self.copies: dict[int, torch.Tensor] = {}
        for spec_id, box, members in sharded_units(paths, self.entries):
            positions = [position for position, _ in members]
            _check_one_device(label, [paths[i] for i in positions], [devices[i] for i in positions])
            targets = ["cpu" if space == "host" else devices[positions[0]] for space in spaces(box)]
            pieces = [
                torch.zeros(x.shape, dtype=x.dtype, device=target)
                for x, target in zip(box.pieces, targets, strict=True)
            ]
            self.entries[positions[0]] = box_of(spec_id, pieces)
            for position, index in members:
                self.destinations[position] = _Destination(
                    tuple(pieces), spec_of(spec_id), index, _ranks_of_rows(spec_of(spec_id), mesh)
                )

    def take(self, positions: list[int], leaf: torch.Tensor, may_keep: bool) -> None:
        """Copy a leaf into its shard, or into several if it is tied."""
        for i in positions:
            if i in self.destinations:
                self.destinations[i].store(leaf, self.mesh)
                continue
            key = id(self.template[i])
            if key not in self.copies:
                moved = device_put(leaf, self.devices[i])
                self.copies[key] = moved if moved is not leaf or (may_keep and i == positions[0]) else leaf.clone()
            self.entries[i] = self.copies[key]

    def tree(self) -> Any:
        """Return the filled tree."""
        return tree.unflatten(self.structure, self.entries)


def _ranks_of_rows(spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """List for each row of a unit's data a rank that holds it."""
    if not mesh.simulated:
        return (mesh.rank,)
    names = tuple([name for name in mesh.axis_names if name in spec.varies])
    return tuple({mesh.index(names, r) if names else 0: r for r in range(mesh.size)}.values())


def _device_like(like: Any, own: torch.device | None, target: torch.device | None) -> torch.device | None:
    """Return the device of a leaf that has no box: that of the leaf in `like`; if this has no values, a count stays."""
    if not isinstance(like, torch.Tensor) or own is None or own.type == "meta":
        return target
    return like.device if not like.is_meta else target if like.ndim else own


def _check_one_device(label: str, paths: list[str], devices: list[Any]) -> None:
    for path, device in zip(paths, devices, strict=True):
        if device != devices[0]:
            raise ValueError(
                f"{label} leaf {path!r} is on {device}, and leaf {paths[0]!r} of the same unit is on {devices[0]}: "
                "give all leaves of a unit values, or none, or put them into different units with units="
            )


# The leaves of a unit lie side by side in one buffer, so that a rank's part of the unit is a slice of the buffer.


def lay_side_by_side(leaves: list[Any], sharded: Any) -> None:
    """Copy the leaves of each unit into one buffer, and drop each leaf as soon as it is copied.

    Besides the leaves, memory holds one more unit, if nothing else references the leaves. Units of one leaf, and boxes,
    stay as they are.

    Args:
        leaves: the leaves of a tree of full leaves; this list is changed in place.
        sharded: the same tree after `partition`, on the meta device.
    """
    paths, entries, _ = tree.flatten_with_paths(sharded, is_box)
    for unit in sharded_units(paths, entries):
        by_index = {index: leaves[position] for position, index in unit.members}
        if len(by_index) > 1 and _are_alike(by_index.values()):
            by_index.clear()
            _pack_unit(leaves, unit)


def _are_alike(leaves: Any) -> bool:
    """Return whether values are tensors of one dtype on one device."""
    return all(isinstance(x, torch.Tensor) for x in leaves) and len({(x.dtype, x.device) for x in leaves}) == 1


def _pack_unit(leaves: list[Any], unit: ShardedUnit) -> None:
    """Copy the leaves of a unit into one buffer, and replace them in `leaves` by views of it."""
    spec = spec_of(unit.spec_id)
    first = leaves[unit.members[0][0]]
    buffer = torch.empty(spec.numel, dtype=first.dtype, device=first.device)
    del first
    views: dict[int, torch.Tensor] = {}
    for position, index in unit.members:
        if index not in views:  # else the leaf is tied, and copied already
            views[index] = view_of(buffer, spec.offsets[index], spec.shapes[index])
            views[index].copy_(leaves[position])
        leaves[position] = views[index]


# Full leaves for a sharded tree of the same structure: each leaf must fit its box.


def supply_like(label: str, values: Any, like: Any, call: str = "") -> LeafSupply:
    """Flatten a tree of full leaves into a supply, in the structure of a sharded tree, where it has leaves and boxes.

    Args:
        label: the name of `values` in messages.
        values: the tree, with the structure, shapes and dtypes of `step.gather(like)`.
        like: the sharded tree. The contents of its tensors are not read.
        call: if the caller donates the leaves, the call that does, for messages.

    Raises:
        ValueError: if the structures differ, or the shape or dtype of a leaf differs from `like`, or tied leaves have
            different values. The message names the path.
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    try:
        leaves = tree.leaves_up_to(tree.unflatten(structure, [_no_box(x) for x in entries]), values, is_box)
    except ValueError as error:
        raise ValueError(f"{label} does not match like=: {error}") from error
    expected = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in entries]
    owner: list[Any] = [id(x) if isinstance(x, torch.Tensor) else None for x in entries]  # equal for tied leaves
    for spec_id, box, members in sharded_units(paths, entries):
        for position, index in members:
            expected[position] = (spec_of(spec_id).full_shapes[index], box.dtype)
            owner[position] = (id(box), index)
    first: dict[Any, int] = {}  # owner -> position
    for i, key in enumerate(owner):
        if key is not None:
            first_position = first.setdefault(key, i)
            _check_tied(label, (paths[first_position], leaves[first_position]), (paths[i], leaves[i]))
    for path, x, shape_and_dtype in zip(paths, leaves, expected, strict=True):
        _check_like(label, path, x, shape_and_dtype)
    return supply_of(label, tree.unflatten(structure, leaves), call)


def _no_box(x: Any) -> Any:
    """Replace a box of leaves by a tensor: `values` has a full leaf there."""
    return torch.empty(0, device="meta") if isinstance(x, Shard | Slot) else x


def _check_like(label: str, path: str, x: Any, expected: tuple[tuple[int, ...], torch.dtype] | None) -> None:
    if expected is None or is_box(x):  # supply_of refuses boxes
        return
    shape, dtype = expected
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != expected:
        raise ValueError(
            f"{label} leaf {path!r} is {tree.show(x)}: expected {dtype} {list(shape)}, as in like=; convert the leaf, "
            "or pass a like= of the same model"
        )


def _check_tied(label: str, leaf: tuple[str, Any], other: tuple[str, Any]) -> None:
    (path, x), (other_path, y) = leaf, other
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if x is not y and tensors and not (x.shape == y.shape and torch.equal(x, y)):
        raise ValueError(
            f"{label} leaves {path!r} and {other_path!r} are tied in like=, and have different values: give them one "
            "value, or untie them in like="
        )
