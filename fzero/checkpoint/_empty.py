"""Memory to read into: of its own for each leaf."""

from typing import Any

import torch

from fzero import tree
from fzero._torch import in_buffers
from fzero.checkpoint._overlaps import overlapping
from fzero.layout.boxes import PerRank, Shard, box_of, is_box
from fzero.layout.pieces import spaces
from fzero.ranks.mesh import Mesh

__all__ = ["made_of"]


def made_of(like: Any, mesh: Mesh | None) -> Any:
    """Give each tensor on the meta device memory, on the mesh's device; shards hold zeros, so their padding does.

    So get leaves that share memory with another leaf, as averages that start as the parameters do. Leaves that lie side
    by side in one buffer will again. All other values are taken over.
    """
    device = mesh.device_mesh.device_type if mesh is not None and mesh.distributed else "cpu"
    entries, structure = tree.flatten(like, is_box)
    plain = {id(x): x for x in entries if isinstance(x, torch.Tensor)}  # one that is tied is one leaf
    boxed = [x for entry in entries for x in _boxed(entry)]  # of a box each is one, whatever is tied
    shared = overlapping([*plain.values(), *boxed])
    meta = [key for key, x in plain.items() if x.is_meta]
    made = in_buffers([plain[k] for k in meta], lambda x, shape, _: torch.empty(shape, dtype=x.dtype, device=device))
    fresh = {key: _zeros(x, device) for i, (key, x) in enumerate(plain.items()) if i in shared}
    plain |= {**fresh, **dict(zip(meta, made, strict=True))}
    places = [place for entry in entries for place in _places(entry, device)]
    fit = [not x.is_meta and i not in shared for i, x in enumerate(boxed, len(plain))]
    own = iter([x if fits else _zeros(x, to) for x, to, fits in zip(boxed, places, fit, strict=True)])
    for i, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            entries[i] = plain[id(x)]
        elif isinstance(x, Shard):
            parts = [next(own) for _ in x.parts]
            entries[i] = x if all(a is b for a, b in zip(parts, x.parts, strict=True)) else box_of(x.uid, parts)
        elif isinstance(x, PerRank):
            leaves, below = tree.flatten(x.value)
            entries[i] = PerRank(tree.unflatten(below, [next(own) if _is_tensor(y) else y for y in leaves]), x.axes)
    return tree.unflatten(structure, entries)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _boxed(entry: Any) -> list[torch.Tensor]:
    """List the tensors in a box."""
    if isinstance(entry, Shard):
        return list(entry.parts)
    return tree.tensors(entry.value) if isinstance(entry, PerRank) else []


def _places(entry: Any, device: str) -> list[str]:
    """List where the tensors in a box belong: the host's pieces of a shard into its memory."""
    if isinstance(entry, Shard):
        return ["cpu" if space == "host" else device for space in spaces(entry)]
    return [device] * len(_boxed(entry))


def _zeros(x: torch.Tensor, device: str) -> torch.Tensor:
    """Make a dense tensor like another; for one on the meta device, on a device."""
    return torch.zeros(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)
