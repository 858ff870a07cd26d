"""Blocks: flat ranges of a tensor's parts, the elements that two ranges share, and a tensor's memory as bytes."""

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import in_buffers, storage_id
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, box_of, is_box, slice_elements, spaces

__all__ = [
    "Block",
    "BlockRange",
    "chunks",
    "full_block",
    "is_direct",
    "materialize",
    "rectangles",
    "runs",
    "view_bytes",
    "view_or_chunks",
]

# Tensors as bytes: views of their memory if this process can access it directly, else small copies.


_CHUNK = 1 << 22  # bytes of a copy


def view_bytes(x: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes. The view keeps the memory alive."""
    if not x.numel():
        return memoryview(b"")
    # not through numpy, which may not be installed and has no bfloat16
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.owner = x
    return memoryview(memory).cast("B")


def is_direct(x: torch.Tensor) -> bool:
    """Return whether this process can read and write a tensor's elements, in order, directly in its memory."""
    return x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def chunks(x: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements from `start` to before `stop`, in row-major order."""
    if is_direct(x):
        yield view_bytes(x.view(-1)[start:stop])
        return
    step = max(_CHUNK // x.element_size(), 1)
    for at in range(start, stop, step):
        for part in view_or_chunks(x, at, min(at + step, stop)):
            yield view_bytes(part.cpu())


def view_or_chunks(x: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements from `start` to before `stop`, contiguous: one view, or small copies in turn."""
    if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        yield x.view(-1)[start:stop]
        return
    step = max(_CHUNK // x.element_size(), 1)
    for at in range(start, stop, step):
        yield slice_elements(x, at, min(at + step, stop)).resolve_conj().resolve_neg().contiguous()


# Tensors that share memory: if two leaves were read into the same memory, both would hold the later one.


def _overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of tensors that share an element with an earlier tensor, or whose own elements overlap."""
    spans = [(storage_id(x), *_span(x), i) for i, x in enumerate(tensors) if x.numel() and not x.is_meta]
    indices = {i for *_, i in spans if _repeats(tensors[i])}
    active: list[tuple[int, int, int, int]] = []
    for span in sorted(spans):
        storage, start, _, i = span
        active = [s for s in active if s[0] == storage and s[2] > start]
        indices.update(max(i, j) for *_, j in active if _share_bytes(tensors[i], tensors[j]))
        active.append(span)
    return indices


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's first byte in its storage, and the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset()) * x.element_size()
    return start, start + (last + 1) * x.element_size()


def _repeats(x: torch.Tensor) -> bool:
    """Return whether a tensor is expanded, so that several elements share memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _share_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping spans share a byte. Two columns of a matrix share none."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    (a, stop), (b, end) = _span(x), _span(y)
    first = min(a, b)
    mask = torch.zeros(max(stop, end) - first, dtype=torch.bool, device="cpu")
    _bytes_in(mask, x, a - first).fill_(True)
    return bool(_bytes_in(mask, y, b - first).any())


def _bytes_in(buffer: torch.Tensor, x: torch.Tensor, at: int) -> torch.Tensor:
    """View the bytes of a buffer that a tensor's elements occupy."""
    size = x.element_size()
    return buffer.as_strided((*x.shape, size), (*[stride * size for stride in x.stride()], 1), at)


# Memory to read into: each leaf gets its own.


def materialize(like: Any, mesh: Mesh | None) -> Any:
    """Allocate memory on the mesh's device for each tensor on the meta device. Shards begin as zeros, for the padding.

    A leaf that shares memory with another leaf gets new memory too, such as averages that start as the parameters.
    Leaves that lie side by side in one buffer lie so again. All other values are kept.
    """
    device = torch.device("cpu") if mesh is None else mesh.device
    entries, structure = tree.flatten(like, is_box)
    plain = {id(x): x for x in entries if isinstance(x, torch.Tensor)}  # a tied tensor is one leaf
    boxed = [x for entry in entries for x in _box_tensors(entry)]  # tensors in boxes are separate leaves, never tied
    shared = _overlapping([*plain.values(), *boxed])
    meta = [key for key, x in plain.items() if x.is_meta]
    buffers = in_buffers([plain[k] for k in meta], lambda x, shape, _: torch.empty(shape, dtype=x.dtype, device=device))
    fresh = {key: _zeros(x, device) for i, (key, x) in enumerate(plain.items()) if i in shared}
    plain |= {**fresh, **dict(zip(meta, buffers, strict=True))}
    devices = [device_name for entry in entries for device_name in _devices(entry, device)]
    usable = [not x.is_meta and i not in shared for i, x in enumerate(boxed, len(plain))]
    boxed_tensors = iter(
        [x if is_usable else _zeros(x, to) for x, to, is_usable in zip(boxed, devices, usable, strict=True)]
    )
    for i, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            entries[i] = plain[id(x)]
        elif isinstance(x, Shard):
            pieces = [next(boxed_tensors) for _ in x.pieces]
            entries[i] = x if all(a is b for a, b in zip(pieces, x.pieces, strict=True)) else box_of(x.spec_id, pieces)
        elif isinstance(x, PerRank):
            leaves, value_structure = tree.flatten(x.value)
            entries[i] = PerRank(
                tree.unflatten(value_structure, [next(boxed_tensors) if _is_tensor(y) else y for y in leaves]), x.axes
            )
    return tree.unflatten(structure, entries)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _box_tensors(entry: Any) -> list[torch.Tensor]:
    """List the tensors in a box."""
    if isinstance(entry, Shard):
        return list(entry.pieces)
    return tree.tensors(entry.value) if isinstance(entry, PerRank) else []


def _devices(entry: Any, device: torch.device) -> list[torch.device]:
    """List the device of each tensor in a box. A shard's host pieces belong in host memory."""
    if isinstance(entry, Shard):
        return [torch.device("cpu") if space == "host" else device for space in spaces(entry)]
    return [device] * len(_box_tensors(entry))


def _zeros(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros with the shape and dtype of a tensor, on its device; on `device` if it is a meta tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)


# Blocks: flat ranges of parts of a tensor, and the runs of elements that two ranges share, all as numbers.


Block = tuple[tuple[int, int], ...]
"""A part of a tensor: the offset and size along each dimension."""


class BlockRange(NamedTuple):
    """The elements of a block from `start` to before `stop`, in row-major order of the block."""

    block: Block
    start: int
    stop: int


class _CommonRun(NamedTuple):
    """Contiguous elements that two ranges share: where they begin in the first and in the second, and how many."""

    source_offset: int
    target_offset: int
    numel: int


class _Rectangle(NamedTuple):
    """A rectangle of consecutive elements of a block; `flat` is the position of the first one in the block."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: int


def full_block(shape: tuple[int, ...]) -> Block:
    """Return the block that covers a whole tensor."""
    return tuple([(0, size) for size in shape])


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[_Rectangle]:
    """Split a flat range of a `d`-dimensional tensor into at most 2 d - 1 rectangles, in order.

    Example:
        >>> [r.sizes for r in rectangles((3, 4), 2, 11)]
        [(1, 2), (1, 4), (1, 3)]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield _Rectangle((start,) if shape else (), (stop - start,) if shape else (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows: from the first to before the last
    if first > last:  # the range lies within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield _Rectangle((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], i: int, start: int, stop: int) -> Iterator[_Rectangle]:
    row = math.prod(shape[1:])
    for r in rectangles(shape[1:], start, stop):
        yield _Rectangle((i, *r.offsets), (1, *r.sizes), i * row + r.flat)


def runs(source: BlockRange, target: BlockRange) -> Iterator[_CommonRun]:
    """List the elements that two ranges of a tensor share, as runs that are contiguous in both.

    Two ranges of one block share at most one run. Two ranges of different blocks share one run per row.
    """
    if source.block == target.block:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            yield _CommonRun(start - source.start, start - target.start, stop - start)
        return
    source_shape, target_shape = [tuple([size for _, size in r.block]) for r in (source, target)]
    for a in rectangles(source_shape, source.start, source.stop):
        for b in rectangles(target_shape, target.start, target.stop):
            yield from _common(source, source_shape, a, target, target_shape, b)


def _common(
    source: BlockRange,
    source_shape: tuple[int, ...],
    a: _Rectangle,
    target: BlockRange,
    target_shape: tuple[int, ...],
    b: _Rectangle,
) -> Iterator[_CommonRun]:
    """List the runs in the intersection of two rectangles."""
    box = []
    for i, n, (x, _), j, m, (y, _) in zip(*a[:2], source.block, *b[:2], target.block, strict=True):
        box.append((max(i + x, j + y), min(i + n + x, j + m + y)))
    if any(low >= high for low, high in box):
        return
    d = len(box) - 1  # a run spans dimensions d, d + 1, ...
    while d and box[d][1] - box[d][0] == source_shape[d] == target_shape[d]:
        d -= 1
    numel = math.prod([high - low for low, high in box[d:]])
    for outer in itertools.product(*[range(low, high) for low, high in box[:d]]):
        first = (*outer, *[low for low, _ in box[d:]])
        yield _CommonRun(_offset_in(first, source, source_shape), _offset_in(first, target, target_shape), numel)


def _offset_in(element: tuple[int, ...], within: BlockRange, shape: tuple[int, ...]) -> int:
    """Return the offset in a range of an element, which has an index along each dimension."""
    at = 0
    for i, (offset, _), size in zip(element, within.block, shape, strict=True):
        at = at * size + i - offset
    return at - within.start
