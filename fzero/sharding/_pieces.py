"""A shard is divided into a part in device memory and a part in host memory, and joined again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero.axes import current_device
from fzero.collectives import to_device
from fzero.sharding._boxes import Shard, Slot, make_box
from fzero.sharding._spec import traced_spec, with_host_share
from fzero.tree import Tree, is_box

__all__ = ["boxes_to_device", "host_numel", "join_pieces", "map_spaces", "shard_to_device", "spaces", "split_shard"]


def spaces(box: Shard) -> list[str]:
    """List the memory of each piece of a box."""
    return [piece.space for piece in traced_spec(box.spec_id).pieces]


def host_numel(spec_id: int) -> int:
    """Count the elements of each rank's shard of a unit that lie on the host."""
    return sum([piece.stop - piece.start for piece in traced_spec(spec_id).pieces if piece.space == "host"])


def split_shard(box: Shard, spec_id: int, move: Callable[[torch.Tensor], torch.Tensor]) -> Shard:
    """Divide a shard of one piece into the pieces of `spec_id`, and move the host's; one of `spec_id` stays."""
    if box.spec_id == spec_id:
        return box
    x = box.data
    pieces = []
    for piece in traced_spec(spec_id).pieces:
        is_all = piece.stop - piece.start == x.shape[-1]
        data = x if is_all else x.narrow(-1, piece.start, piece.stop - piece.start)
        if piece.space == "host":
            data = move(data)
        elif not is_all and not is_tracing():  # a view would keep the whole shard in device memory
            data = data.clone()
        pieces.append(data)
    return make_box(spec_id, pieces)


def join_pieces(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the pieces of a shard. A single piece is returned as it is, without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), -1)


def shard_to_device(box: Shard, device: torch.device | None = None) -> Shard:
    """Return a box with its shard in one piece on the device. A box without a piece on the host is returned as it is.

    Args:
        box: the shard's box.
        device: the device; by default the device of the box's other piece, or else the mesh's device.

    Raises:
        ValueError: if the box holds trees and no tensors, as in the state of `optim.leafwise`.
    """
    if not all(isinstance(x, torch.Tensor) for x in box.pieces):
        raise ValueError(
            f"unit {traced_spec(box.spec_id).unit!r} of a state holds {type(box.pieces[0]).__name__}s and no tensors, "
            'as optim.leafwise makes it: it can neither be gathered nor offloaded with update_on="device"'
        )
    if "host" not in spaces(box):
        return box
    pieces = list(zip(spaces(box), box.pieces, strict=True))
    devices = [x.device for space, x in pieces if space == "device"]
    target = device or (devices[0] if devices else current_device())
    device_pieces = [to_device(x, target) if space == "host" else x for space, x in pieces]
    return Shard(join_pieces(device_pieces), with_host_share(box.spec_id, 0))


def boxes_to_device(values: Tree) -> Tree:
    """Return a tree with the shard of each box in one piece, on the device."""
    entries, structure = tree.flatten(values, is_box)
    for i, x in enumerate(entries):
        if isinstance(x, Shard):
            entries[i] = shard_to_device(x)
        elif isinstance(x, Slot):
            entries[i] = Slot(with_host_share(x.spec_id, 0), x.index)
    return tree.unflatten(structure, entries)


def map_spaces(f: Callable[..., Any], values: Tree, *rest: Tree) -> Tree:
    """Apply `f(space, x, ...)` to the leaves of trees of one layout. `space` is the memory in which `x` lies."""
    entries, structure = tree.flatten(values, is_box)
    columns = [entries, *[tree.leaves_up_to(values, other, is_box) for other in rest]]
    plain = [[None if is_box(x) else y for x, y in zip(entries, ys, strict=True)] for ys in columns]
    out = tree.map(partial(f, "device"), *plain)  # in one call, so that tied leaves stay tied
    for i, (x, *ys) in enumerate(zip(*columns, strict=True)):
        if isinstance(x, Shard):
            pieces = zip(spaces(x), x.pieces, *[y.pieces for y in ys], strict=True)
            out[i] = make_box(x.spec_id, [tree.map(partial(f, space), *xs) for space, *xs in pieces])
        elif is_box(x):
            out[i] = x
    return tree.unflatten(structure, out)
