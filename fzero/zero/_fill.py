"""Fill the boxes of a template with full leaves, one after the other, so that no rank needs all of them at once."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.ranks import Mesh, check_equal, checksum, device_put
from fzero.sharding import Spec, is_box, lookup_spec, make_box, sharded_units, slice_elements, spaces
from fzero.zero._tree_source import TreeSource

__all__ = ["fill_template"]


def fill_template(label: str, source: TreeSource, template: Any, mesh: Mesh, like: Any = None) -> Any:
    """Put the leaves of a tree into the boxes of a template, on the mesh's device.

    Leaves on the meta device stay there. At any time memory holds the boxes, one leaf, the inputs of this leaf, and
    leaves that the caller still references.

    Args:
        label: the tree's name in messages.
        source: the leaves. Values that are not tensors are copied into the result as they are.
        template: the tree with boxes in place of its sharded leaves. The contents of the boxes are not read.
        mesh: the ranks; in a simulation the boxes hold all ranks' shards.
        like: a tree of the same structure, of whose leaves without a box each device is kept; None for the mesh's.

    Returns:
        The tree with the boxes of the template, in memory of its own.

    Raises:
        ValueError: if a leaf differs between ranks (raised on all ranks), or if only some leaves of a unit have values.
            The message names the leaf.
    """
    source.check_before(label, mesh)
    paths, entries, structure = tree.flatten_with_paths(template, is_box)
    devices: list[Any] = [x if x is None or x.type == "meta" else mesh.device for x in source.devices]
    boxes, destinations = _make_zero_boxes(label, (paths, entries), devices, mesh)
    targets = devices if like is None else list(map(_device_like, entries, source.devices, devices))
    copies = _PlainCopies(entries, targets)
    result = [
        boxes.get(i, x) if isinstance(leaf, torch.Tensor) else mesh.device_put(leaf)
        for i, (x, leaf) in enumerate(zip(entries, source.leaves, strict=True))
    ]
    sums: list[Any] = [None] * len(source.leaves)
    for positions, leaf, owns_memory in source.iter_leaves():
        if mesh.distributed and source.needs_checksums:
            total = checksum(leaf)
            for i in positions:
                sums[i] = total
        for i in positions:
            if i in destinations:
                destinations[i].store(leaf, mesh)
            else:
                result[i] = copies.put(i, leaf, may_keep=owns_memory and i == positions[0])
        del leaf  # before the source makes the next one
    if source.needs_checksums:
        check_equal(label, tree.unflatten(source.structure, source.leaves), mesh, sums)
    return tree.unflatten(structure, result)


def _make_zero_boxes(
    label: str, template: tuple[list[str], list[Any]], devices: list[Any], mesh: Mesh
) -> tuple[dict[int, Any], dict[int, "_Destination"]]:
    """Make the boxes of a template anew, filled with zeros.

    Args:
        label: the tree's name in messages.
        template: the paths and the entries of the template.
        devices: the device of each leaf.
        mesh: the ranks.

    Returns:
        Each box by its position in the tree, and each sharded leaf's destination by the leaf's position.
    """
    boxes: dict[int, Any] = {}
    destinations: dict[int, _Destination] = {}
    ranks_of_rows: dict[tuple[str, ...], tuple[int, ...]] = {}  # few kinds of units, and thousands of ranks in a plan
    paths, entries = template
    for spec_id, box, members in sharded_units(paths, entries):
        positions = [position for position, _ in members]
        _check_one_device(label, [paths[i] for i in positions], [devices[i] for i in positions])
        targets = ["cpu" if space == "host" else devices[positions[0]] for space in spaces(box)]
        pieces = [
            torch.zeros(x.shape, dtype=x.dtype, device=target) for x, target in zip(box.pieces, targets, strict=True)
        ]
        boxes[positions[0]] = make_box(spec_id, pieces)
        spec = lookup_spec(spec_id)
        names = tuple([name for name in mesh.axis_names if name in spec.varies])
        if names not in ranks_of_rows:
            ranks_of_rows[names] = _row_ranks(names, mesh)
        for position, index in members:
            destinations[position] = _Destination(tuple(pieces), spec, index, ranks_of_rows[names])
    return boxes, destinations


class _PlainCopies:
    """The copies of leaves without a box. Tied leaves are one entry of the template, and stay tied."""

    def __init__(self, entries: list[Any], devices: list[Any]) -> None:
        self._entries = entries
        self._devices = devices
        self._by_entry: dict[int, torch.Tensor] = {}  # by the entry's id

    def put(self, position: int, leaf: torch.Tensor, may_keep: bool) -> torch.Tensor:
        """Return a leaf on the device of its entry, in memory of its own; the leaf itself only if it `may_keep` it."""
        key = id(self._entries[position])
        if key not in self._by_entry:
            device_leaf = device_put(leaf, self._devices[position])
            self._by_entry[key] = device_leaf if device_leaf is not leaf or may_keep else leaf.clone()
        return self._by_entry[key]


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
                range_start, range_stop = max(start, offset), min(start + x.shape[-1], offset + size)
                if range_start < range_stop:
                    part = leaf
                    for s in self.spec.split:  # the rank's part of a leaf that is split along further axes
                        width = part.shape[s.dims[index]] // s.size
                        part = part.narrow(s.dims[index], mesh.index(s.axis, rank) * width, width)
                    row[range_start - start : range_stop - start] = slice_elements(
                        part, range_start - offset, range_stop - offset
                    )


def _row_ranks(names: tuple[str, ...], mesh: Mesh) -> tuple[int, ...]:
    """List for each row of the data of a unit that differs along some axes a rank that holds it."""
    if not mesh.simulated:
        return (mesh.rank,)
    return tuple({mesh.index(names, r) if names else 0: r for r in range(mesh.size)}.values())


def _device_like(like: Any, own: torch.device | None, target: torch.device | None) -> torch.device | None:
    """Return the device of a leaf that has no box: that of the leaf in `like`; if this has no values, a count stays."""
    if not isinstance(like, torch.Tensor) or own is None or own.type == "meta":
        return target
    if not like.is_meta:
        return like.device
    return target if like.ndim else own


def _check_one_device(label: str, paths: list[str], devices: list[Any]) -> None:
    for path, device in zip(paths, devices, strict=True):
        if device != devices[0]:
            raise ValueError(
                f"{label} leaf {path!r} is on {device}, and leaf {paths[0]!r} of the same unit is on {devices[0]}: "
                "give all leaves of a unit values, or none, or put them into different units with units="
            )
