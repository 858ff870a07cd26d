"""Chunks: flat ranges of parts of a tensor, and the runs of elements that two ranges share, all as numbers."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Chunk", "ChunkRange", "full_chunk", "rectangles", "runs"]


Chunk = tuple[tuple[int, int], ...]
"""A part of a tensor, as in torch's DCP: the offset and size along each dimension."""


class ChunkRange(NamedTuple):
    """The elements of a chunk from `start` to before `stop`, in row-major order of the chunk."""

    chunk: Chunk
    start: int
    stop: int


class _CommonRun(NamedTuple):
    """Contiguous elements that two ranges share: where they begin in the first and in the second, and how many."""

    source_offset: int
    target_offset: int
    numel: int


class _Rectangle(NamedTuple):
    """A rectangle of consecutive elements of a chunk; `flat` is the position of the first one in the chunk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: int


def full_chunk(shape: tuple[int, ...]) -> Chunk:
    """Return the chunk that covers a whole tensor."""
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
    first_row, last_row = -(-start // row), stop // row  # full rows: from the first to before the last
    if first_row > last_row:  # the range lies within one row
        yield from _split_row(shape, last_row, start - last_row * row, stop - last_row * row)
        return
    if start < first_row * row:
        yield from _split_row(shape, first_row - 1, start - (first_row - 1) * row, row)
    if first_row < last_row:
        yield _Rectangle((first_row, *[0] * (len(shape) - 1)), (last_row - first_row, *shape[1:]), first_row * row)
    if last_row * row < stop:
        yield from _split_row(shape, last_row, 0, stop - last_row * row)


def _split_row(shape: tuple[int, ...], i: int, start: int, stop: int) -> Iterator[_Rectangle]:
    row = math.prod(shape[1:])
    for r in rectangles(shape[1:], start, stop):
        yield _Rectangle((i, *r.offsets), (1, *r.sizes), i * row + r.flat)


def runs(source: ChunkRange, target: ChunkRange) -> Iterator[_CommonRun]:
    """List the elements that two ranges of a tensor share, as runs that are contiguous in both.

    Two ranges of one chunk share at most one run. Two ranges of different chunks share one run per row.
    """
    if source.chunk == target.chunk:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            yield _CommonRun(start - source.start, start - target.start, stop - start)
        return
    source_shape, target_shape = [tuple([size for _, size in r.chunk]) for r in (source, target)]
    for a in rectangles(source_shape, source.start, source.stop):
        for b in rectangles(target_shape, target.start, target.stop):
            yield from _common_runs(source, source_shape, a, target, target_shape, b)


def _common_runs(
    source: ChunkRange,
    source_shape: tuple[int, ...],
    a: _Rectangle,
    target: ChunkRange,
    target_shape: tuple[int, ...],
    b: _Rectangle,
) -> Iterator[_CommonRun]:
    """List the runs in the intersection of two rectangles."""
    extents = []
    for i, n, (x, _), j, m, (y, _) in zip(*a[:2], source.chunk, *b[:2], target.chunk, strict=True):
        extents.append((max(i + x, j + y), min(i + n + x, j + m + y)))
    if any(low >= high for low, high in extents):
        return
    d = len(extents) - 1  # a run spans dimensions d, d + 1, ...
    while d and extents[d][1] - extents[d][0] == source_shape[d] == target_shape[d]:
        d -= 1
    numel = math.prod([high - low for low, high in extents[d:]])
    for outer in itertools.product(*[range(low, high) for low, high in extents[:d]]):
        first = (*outer, *[low for low, _ in extents[d:]])
        yield _CommonRun(_offset_in(first, source, source_shape), _offset_in(first, target, target_shape), numel)


def _offset_in(element: tuple[int, ...], chunk_range: ChunkRange, shape: tuple[int, ...]) -> int:
    """Return the offset in a range of an element, which has an index along each dimension."""
    offset = 0
    for i, (first, _), size in zip(element, chunk_range.chunk, shape, strict=True):
        offset = offset * size + i - first
    return offset - chunk_range.start
