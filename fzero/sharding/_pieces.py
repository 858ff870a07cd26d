"""Pieces: a shard of which a part lies in host memory, cut and put together."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fzero import tree
from fzero._torch import group_of, is_tracing
from fzero.axes import PLANNED, bound, is_lockstep
from fzero.collectives import to_device
from fzero.sharding._boxes import Shard, Slot, box_of, is_box
from fzero.sharding._spec import facts, on_host
from fzero.tree import Tree

__all__ = ["concatenated", "host_elements", "in_pieces", "lifted", "map_spaces", "on_device", "spaces"]


def spaces(box: Shard) -> list[str]:
    """List the memory of each piece of a box."""
    return [piece.space for piece in facts(box.uid).pieces]


def host_elements(uid: int) -> int:
    """Count the elements of each rank's shard of a unit that lie on the host."""
    return sum([piece.stop - piece.start for piece in facts(uid).pieces if piece.space == "host"])


def in_pieces(box: Shard, uid: int, move: Callable[[torch.Tensor], torch.Tensor]) -> Shard:
    """Cut a shard that is in one piece in those of `uid`, and move those of the host; one that is cut so stays."""
    if box.uid == uid:
        return box
    x, parts = box.data, []
    for piece in facts(uid).pieces:
        whole = piece.stop - piece.start == x.shape[-1]
        part = x if whole else x.narrow(-1, piece.start, piece.stop - piece.start)
        if piece.space == "host":
            part = move(part)
        elif not whole and not is_tracing():  # a view would keep all of the shard on the device
            part = part.clone()
        parts.append(part)
    return box_of(uid, parts)


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put pieces together; one is all there is, and is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)


def on_device(box: Shard, device: torch.device | None = None) -> Shard:
    """Return a box whose shard is in one piece, on the device; one that is so already is returned as it is.

    Args:
        box: any.
        device: where to; by default where its other piece is, or the mesh's.

    Raises:
        ValueError: if it holds trees of a pair of its own, as the state of `optim.leafwise` does.
    """
    if not all(isinstance(x, torch.Tensor) for x in box.parts):
        raise ValueError(
            f"unit {facts(box.uid).unit!r} of a state holds {type(box.parts[0]).__name__}s and no tensors, as "
            'optim.leafwise makes it: it can neither be gathered nor be offloaded with update="device"'
        )
    if "host" not in spaces(box):
        return box
    pieces = list(zip(spaces(box), box.parts, strict=True))
    here = [x.device for space, x in pieces if space == "device"]
    there = device or (here[0] if here else _device_of_the_mesh())
    parts = [to_device(x, there) if space == "host" else x for space, x in pieces]
    return Shard(concatenated(parts), on_host(box.uid, 0))


def lifted(values: Tree) -> Tree:
    """Return a tree whose boxes are in one piece each, on the device."""
    entries, structure = tree.flatten(values, is_box)
    for i, x in enumerate(entries):
        if isinstance(x, Shard):
            entries[i] = on_device(x)
        elif isinstance(x, Slot):
            entries[i] = Slot(on_host(x.uid, 0), x.index)
    return tree.unflatten(structure, entries)


def map_spaces(f: Callable[..., Any], values: Tree, *rest: Tree) -> Tree:
    """Apply `f(space, x, ...)` to the leaves of trees cut alike, where each says in which memory it lies."""
    entries, structure = tree.flatten(values, is_box)
    columns = [entries, *[tree.leaves_up_to(values, other, is_box) for other in rest]]
    plain = [[None if is_box(x) else y for x, y in zip(entries, ys, strict=True)] for ys in columns]
    out = tree.map(partial(f, "device"), *plain)  # one list, so that ties stay tied
    for i, (x, *others) in enumerate(zip(*columns, strict=True)):
        if isinstance(x, Shard):
            parts = zip(spaces(x), x.parts, *[y.parts for y in others], strict=True)
            out[i] = box_of(x.uid, [tree.map(partial(f, space), *xs) for space, *xs in parts])
        elif is_box(x):
            out[i] = x
    return tree.unflatten(structure, out)


def _device_of_the_mesh() -> torch.device:
    """Return the device that the bound axes' process groups communicate on; the CPU in a simulation."""
    groups = [a.group for a in bound() if a.group and not is_lockstep(a.group) and not a.group.startswith(PLANNED)]
    if any("nccl" in dist.get_backend(group_of(group)) for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
