"""A unit as one flat buffer: leaves to buffer, buffer to leaves, and a rank's range of the buffer.

Leading dimensions, before a leaf's own or before a buffer's single one, pass through. They belong to a user's vmap
or to the ranks of a simulation, and are written `..`.
"""

import math
from functools import partial

import torch

from fzero._torch import OneNode
from fzero._torch.types import Tensors
from fzero.sharding._spec import Spec

__all__ = ["flatten_by_copies", "flatten_leaves", "flatten_unit", "own_range", "pad_own", "view_leaves"]


def _leading_shape(spec: Spec, leaves: Tensors) -> tuple[int, ...]:
    """Return the shape of the leading dimensions, before the leaves' own."""
    return tuple(leaves[0].shape[: leaves[0].ndim - len(spec.shapes[0])])


def flatten_unit(spec: Spec, leaves: Tensors, padded: bool = True) -> torch.Tensor:
    """Concatenate a unit's leaves `[.., *shape]` into one buffer `[.., N k]` (without `padded`, `[.., numel]`)."""
    padding = spec.shard_numel * spec.ranks - spec.numel if padded else 0
    return flatten_leaves(list(leaves), len(_leading_shape(spec, leaves)), padding)


def view_leaves(spec: Spec, buffer: torch.Tensor) -> list[torch.Tensor]:
    """View a unit's buffer `[.., N k]` as its leaves `[.., *shape]`; no copy."""
    return view_ranges(buffer, list(spec.sizes), [list(shape) for shape in spec.shapes])


@OneNode
def flatten_leaves(leaves: list[torch.Tensor], leading: int, padding: int) -> torch.Tensor:
    """Concatenate tensors, flattened after their `leading` first dimensions, and append `padding` zeros."""
    parts = [x.reshape((*x.shape[:leading], x.shape[leading:].numel())) for x in leaves]
    if padding:
        parts.append(leaves[0].new_zeros((*leaves[0].shape[:leading], padding)))
    return torch.cat(parts, dim=leading)


def _view_by_strides(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """Do the same as `view_ranges`, on a stand-in: with one operation for each part."""
    if buffer.dim() > 1 or not buffer.is_contiguous():
        return view_ranges.f(buffer, sizes, shapes)
    offset = buffer.storage_offset()
    parts: list[torch.Tensor] = []
    for size, shape in zip(sizes, shapes, strict=True):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        parts.append(buffer.as_strided(shape, strides, offset))
        offset += size
    return parts


@partial(OneNode, on_stand_ins=_view_by_strides)
def view_ranges(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """View consecutive ranges of a buffer `[.., n]` as tensors `[.., *shape]`."""
    leading_shape = buffer.shape[:-1]
    start = 0
    parts: list[torch.Tensor] = []
    for size, shape in zip(sizes, shapes, strict=True):
        parts.append(buffer.narrow(len(leading_shape), start, size).view((*leading_shape, *shape)))
        start += size
    return parts


def flatten_by_copies(leaves: list[torch.Tensor], leading: int, padding: int) -> torch.Tensor:
    """Do the same as `flatten_leaves`, on tensors that no transform tracks, with no memory besides the result's."""
    if not padding and all(x.is_contiguous() for x in leaves):
        return flatten_leaves.f(leaves, leading, padding)
    leading_shape = leaves[0].shape[:leading]
    sizes = [x.shape[leading:].numel() for x in leaves]
    buffer = leaves[0].new_empty((*leading_shape, sum(sizes) + padding))
    start = 0
    for x, size in zip(leaves, sizes, strict=True):
        buffer.narrow(leading, start, size).view(x.shape).copy_(x)
        start += size
    buffer.narrow(leading, start, padding).zero_()
    return buffer


def own_range(spec: Spec, leaves: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """Copy one of `ranks` equal parts `[.., k]` out of a unit's leaves, in O(k): the full buffer is never built."""
    leading_shape, k = _leading_shape(spec, leaves), spec.shard_numel * spec.ranks // ranks
    start, stop = rank * k, rank * k + k
    parts = []
    for x, offset, size in zip(leaves, spec.offsets, spec.sizes, strict=False):
        first, last = max(start - offset, 0), min(stop - offset, size)
        if first < last:
            parts.append(x.reshape((*leading_shape, size)).narrow(len(leading_shape), first, last - first))
    padding = k - sum(part.shape[-1] for part in parts)
    if padding or not parts:
        parts.append(leaves[0].new_zeros((*leading_shape, padding)))
    return torch.cat(parts, dim=len(leading_shape))


def pad_own(spec: Spec, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Put one part `[.., k]` at its offset in a unit of zeros: the transpose of `own_range`."""
    *leading_shape, k = shard.shape
    buffer = shard.new_zeros((*leading_shape, spec.shard_numel * spec.ranks))
    buffer.narrow(len(leading_shape), rank * k, k).copy_(shard)
    return view_leaves(spec, buffer)
