"""A unit as one flat buffer, and parts of a tensor as flat ranges of its elements."""

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

# A unit as one flat buffer: leaves to buffer, buffer to leaves, and the own range of it.
#
# Dimensions in front of a leaf's own, or of a buffer's one, are carried through: a user's vmap, or the ranks of a
# simulation, put them there. They are written `..`.


def _rows(spec: Spec, leaves: Tensors) -> tuple[int, ...]:
    """Return the sizes of the dimensions in front of the leaves' own."""
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
    """Concatenate tensors, flattened behind their first `rows` dimensions, and then `padding` zeros."""
    parts = [x.reshape((*x.shape[:rows], x.shape[rows:].numel())) for x in leaves]
    if padding:
        parts.append(leaves[0].new_zeros((*leaves[0].shape[:rows], padding)))
    return torch.cat(parts, dim=rows)


def _strided(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """Do what `unpacked` does, on a stand-in: by one operation a part."""
    if buffer.dim() > 1 or not buffer.is_contiguous():
        return unpacked.f(buffer, sizes, shapes)
    at, found = buffer.storage_offset(), []
    for size, shape in zip(sizes, shapes, strict=True):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        found.append(buffer.as_strided(shape, strides, at))
        at += size
    return found


@partial(OneNode, on_stand_ins=_strided)
def unpacked(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """View the parts of a buffer `[.., n]` that begin one after the other, as tensors `[.., *shape]`."""
    rows, at, found = buffer.shape[:-1], 0, []
    for size, shape in zip(sizes, shapes, strict=True):
        found.append(buffer.narrow(len(rows), at, size).view((*rows, *shape)))
        at += size
    return found


def packed_by_copies(leaves: list[torch.Tensor], rows: int, padding: int) -> torch.Tensor:
    """Do what `packed` does, on tensors that no transform tracks, with no memory but the result's."""
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
    """Copy one of `ranks` equal parts `[.., k]` out of a unit's leaves: O(k), the whole buffer is never built."""
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
    """Put one part `[.., k]` in its place among zeros: the transpose of `own_range`."""
    *rows, k = shard.shape
    buffer = shard.new_zeros((*rows, spec.shard_numel * spec.ranks))
    buffer.narrow(len(rows), rank * k, k).copy_(shard)
    return unpack(spec, buffer)


# ---------------------------------------------------------------- dtypes


def gathered_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a shard is gathered in: its own, or by a precision policy that of the parameters."""
    return x.dtype if spec.cast is None else spec.dtype


def wire_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a gradient is summed over ranks in: its own, or a precision policy's."""
    return x.dtype if spec.cast is None else spec.cast[0]


def to_gradient_dtype(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a gradient that was summed over ranks to the dtype that the update gets."""
    return x if spec.cast is None else x.to(spec.cast[1])


# Part of a tensor's elements, in their order, without a copy of the rest: whatever its strides are.


def elements(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements from `start` to before `stop` of a tensor, in row-major order: `[stop - start]`.

    A view where the tensor is contiguous; else a copy of these elements alone, where `x.reshape(-1)` copies all.
    """
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    parts = [part.reshape(-1) for part in _slices(x, start, stop)]
    return torch.cat(parts) if parts else x.new_empty(0)


def put_elements(x: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy `values` `[n]` into a tensor, from its element `start` on in row-major order, and no copy of the rest."""
    at = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: whole rows, and at either end a part of one."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first, last = -(-start // row), stop // row  # whole rows: from the first to before the last
    if first > last:  # all in one row
        return _slices(x[last], start - last * row, stop - last * row)
    before = _slices(x[first - 1], start - (first - 1) * row, row) if first * row > start else []
    after = _slices(x[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([x[first:last]] if first < last else []), *after]
