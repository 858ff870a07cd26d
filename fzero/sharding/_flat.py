"""Flat buffers: pack the leaves of a unit into one buffer, and read or write ranges of a tensor's elements."""

import math
from functools import partial

import torch

from fzero._torch import OneNode
from fzero.collectives import Tensors
from fzero.sharding._spec import Spec

__all__ = [
    "elements",
    "gathered_dtype",
    "own_range",
    "pack",
    "pad_own",
    "put_elements",
    "to_gradient_dtype",
    "unpack",
    "wire_dtype",
]

# A unit as one flat buffer: leaves to buffer, buffer to leaves, and a rank's range of the buffer.
#
# Leading dimensions, before a leaf's own or before a buffer's single one, pass through. They belong to a user's vmap
# or to the ranks of a simulation, and are written `..`.


def _rows(spec: Spec, leaves: Tensors) -> tuple[int, ...]:
    """Return the sizes of the leading dimensions, before the leaves' own."""
    return tuple(leaves[0].shape[: leaves[0].ndim - len(spec.shapes[0])])


def pack(spec: Spec, leaves: Tensors, padded: bool = True) -> torch.Tensor:
    """Concatenate a unit's leaves `[.., *shape]` into one buffer `[.., N k]` (without `padded`, `[.., numel]`)."""
    padding = spec.shard_numel * spec.ranks - spec.numel if padded else 0
    return packed(list(leaves), len(_rows(spec, leaves)), padding)


def unpack(spec: Spec, buffer: torch.Tensor) -> list[torch.Tensor]:
    """View a unit's buffer `[.., N k]` as its leaves `[.., *shape]`; no copy."""
    return unpacked(buffer, list(spec.sizes), [list(shape) for shape in spec.shapes])


@OneNode
def packed(leaves: list[torch.Tensor], rows: int, padding: int) -> torch.Tensor:
    """Concatenate tensors, flattened after their first `rows` dimensions, and append `padding` zeros."""
    parts = [x.reshape((*x.shape[:rows], x.shape[rows:].numel())) for x in leaves]
    if padding:
        parts.append(leaves[0].new_zeros((*leaves[0].shape[:rows], padding)))
    return torch.cat(parts, dim=rows)


def _strided(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """Do the same as `unpacked`, on a stand-in: with one operation for each part."""
    if buffer.dim() > 1 or not buffer.is_contiguous():
        return unpacked.f(buffer, sizes, shapes)
    at, parts = buffer.storage_offset(), []
    for size, shape in zip(sizes, shapes, strict=True):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        parts.append(buffer.as_strided(shape, strides, at))
        at += size
    return parts


@partial(OneNode, on_stand_ins=_strided)
def unpacked(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """View consecutive parts of a buffer `[.., n]` as tensors `[.., *shape]`."""
    rows, at, parts = buffer.shape[:-1], 0, []
    for size, shape in zip(sizes, shapes, strict=True):
        parts.append(buffer.narrow(len(rows), at, size).view((*rows, *shape)))
        at += size
    return parts


def packed_by_copies(leaves: list[torch.Tensor], rows: int, padding: int) -> torch.Tensor:
    """Do the same as `packed`, on tensors that no transform tracks, without memory besides the result's."""
    if not padding and all(x.is_contiguous() for x in leaves):
        return packed.f(leaves, rows, padding)
    front = leaves[0].shape[:rows]
    sizes = [x.shape[rows:].numel() for x in leaves]
    buffer, at = leaves[0].new_empty((*front, sum(sizes) + padding)), 0
    for x, size in zip(leaves, sizes, strict=True):
        buffer.narrow(rows, at, size).view(x.shape).copy_(x)
        at += size
    buffer.narrow(rows, at, padding).zero_()
    return buffer


def own_range(spec: Spec, leaves: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """Copy one of `ranks` equal parts `[.., k]` out of a unit's leaves, in O(k): the full buffer is never built."""
    rows, k = _rows(spec, leaves), spec.shard_numel * spec.ranks // ranks
    start, stop = rank * k, rank * k + k
    parts = []
    for x, offset, size in zip(leaves, spec.offsets, spec.sizes, strict=False):
        first, last = max(start - offset, 0), min(stop - offset, size)
        if first < last:
            parts.append(x.reshape((*rows, size)).narrow(len(rows), first, last - first))
    padding = k - sum(part.shape[-1] for part in parts)
    if padding or not parts:
        parts.append(leaves[0].new_zeros((*rows, padding)))
    return torch.cat(parts, dim=len(rows))


def pad_own(spec: Spec, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Put one part `[.., k]` at its place in a unit of zeros: the transpose of `own_range`."""
    *rows, k = shard.shape
    buffer = shard.new_zeros((*rows, spec.shard_numel * spec.ranks))
    buffer.narrow(len(rows), rank * k, k).copy_(shard)
    return unpack(spec, buffer)


# ---------------------------------------------------------------- dtypes


def gathered_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a shard is gathered: its own, or the parameters' dtype under a precision policy."""
    return x.dtype if spec.cast is None else spec.dtype


def wire_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is summed over ranks: its own, or a precision policy's."""
    return x.dtype if spec.cast is None else spec.cast[0]


def to_gradient_dtype(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a gradient, after its sum over ranks, to the dtype that the optimizer's update receives."""
    return x if spec.cast is None else x.to(spec.cast[1])


# Ranges of a tensor's elements in row-major order, for any strides, without a copy of the other elements.


def elements(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements `[start, stop)` of a tensor, in row-major order: a tensor `[stop - start]`.

    The result is a view if the tensor is contiguous. Otherwise it copies these elements alone; `x.reshape(-1)` would
    copy all.
    """
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    parts = [part.reshape(-1) for part in _slices(x, start, stop)]
    return torch.cat(parts) if parts else x.new_empty(0)


def put_elements(x: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy `values` `[n]` into a tensor, from its element `start` on in row-major order, without any other copy."""
    at = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: full rows, and parts of rows at both ends."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first, last = -(-start // row), stop // row  # the full rows are [first, last)
    if first > last:  # all in one row
        return _slices(x[last], start - last * row, stop - last * row)
    before = _slices(x[first - 1], start - (first - 1) * row, row) if first * row > start else []
    after = _slices(x[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([x[first:last]] if first < last else []), *after]
