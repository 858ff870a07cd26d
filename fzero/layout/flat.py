"""A unit as one flat buffer: leaves to buffer, buffer to leaves, and the own range of it.

Each function takes `lead`, the number of leading dimensions that all its tensors share and that are carried
through: 0, or more under a user's vmap.
"""

import torch

from fzero.collectives.table import Tensors
from fzero.layout.spec import Spec

__all__ = ["gathered_dtype", "own_range", "pack", "pad_own", "reduced", "unpack", "wire_dtype"]


def pack(spec: Spec, leaves: Tensors, lead: int = 0, padded: bool = True) -> torch.Tensor:
    """Concatenate a unit's leaves `[.., *shape]` into one buffer `[.., N k]` (without `padded`, `[.., numel]`)."""
    rows = leaves[0].shape[:lead]
    parts = [x.reshape((*rows, size)) for x, size in zip(leaves, spec.sizes, strict=True)]
    padding = spec.shard_numel * spec.ranks - spec.numel
    if padded and padding:
        parts.append(leaves[0].new_zeros((*rows, padding)))
    return torch.cat(parts, dim=lead)


def unpack(spec: Spec, buffer: torch.Tensor, lead: int = 0) -> list[torch.Tensor]:
    """View a unit's buffer `[.., N k]` as its leaves `[.., *shape]`; no copy."""
    rows = buffer.shape[:lead]
    return [
        buffer.narrow(lead, offset, size).view((*rows, *shape))
        for offset, size, shape in zip(spec.offsets, spec.sizes, spec.shapes, strict=False)
    ]


def gathered_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a shard is gathered in: its own, or by a precision policy that of the parameters."""
    return x.dtype if spec.cast is None else spec.dtype


def wire_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a gradient is summed over ranks in: its own, or a precision policy's."""
    return x.dtype if spec.cast is None else spec.cast[0]


def reduced(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a gradient that was summed over ranks to the dtype that the update gets."""
    return x if spec.cast is None else x.to(spec.cast[1])


def own_range(spec: Spec, leaves: Tensors, rank: int, ranks: int, lead: int = 0) -> torch.Tensor:
    """Copy one of `ranks` equal parts `[.., k]` out of a unit's leaves: O(k), the whole buffer is never built."""
    rows, k = leaves[0].shape[:lead], spec.shard_numel * spec.ranks // ranks
    start, stop = rank * k, rank * k + k
    parts = []
    for x, offset, size in zip(leaves, spec.offsets, spec.sizes, strict=False):
        first, last = max(start - offset, 0), min(stop - offset, size)
        if first < last:
            parts.append(x.reshape((*rows, size)).narrow(lead, first, last - first))
    padding = k - sum(part.shape[lead] for part in parts)
    if padding or not parts:
        parts.append(leaves[0].new_zeros((*rows, padding)))
    return torch.cat(parts, dim=lead)


def pad_own(spec: Spec, shard: torch.Tensor, rank: int, lead: int = 0) -> list[torch.Tensor]:
    """Put one part `[.., k]` in its place among zeros: the transpose of `own_range`."""
    rows, k = shard.shape[:lead], shard.shape[lead]
    buffer = shard.new_zeros((*rows, spec.shard_numel * spec.ranks))
    buffer.narrow(lead, rank * k, k).copy_(shard)
    return unpack(spec, buffer, lead)
