"""Blocks: flat ranges of parts of a tensor, and the runs of elements that two of them share. Numbers only."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Block", "BlockRange", "CommonRun", "rectangles", "runs", "whole"]

Block = tuple[tuple[int, int], ...]
"""A part of a tensor: its offset and size along each dimension."""


class BlockRange(NamedTuple):
    """The elements of a block from `start` to before `stop`, in row-major order of the block."""

    block: Block
    start: int
    stop: int


class CommonRun(NamedTuple):
    """Elements that follow one another in two ranges: where they begin in each, from its start, and how many."""

    at: int
    to: int
    numel: int


class Rectangle(NamedTuple):
    """A box of elements of a block that lie one after the other; `flat` is where the first one is in the block."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat: int


def whole(shape: tuple[int, ...]) -> Block:
    """Return the block that is all of a tensor."""
    return tuple([(0, size) for size in shape])


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut a flat range of a tensor of `d` dimensions into at most 2 d - 1 rectangles, in their order.

    Example:
        >>> [r.sizes for r in rectangles((3, 4), 2, 11)]
        [(1, 2), (1, 4), (1, 3)]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Rectangle((start,) if shape else (), (stop - start,) if shape else (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: from the first to before the last
    if first > last:  # all in one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Rectangle((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], i: int, start: int, stop: int) -> Iterator[Rectangle]:
    row = math.prod(shape[1:])
    for r in rectangles(shape[1:], start, stop):
        yield Rectangle((i, *r.offsets), (1, *r.sizes), i * row + r.flat)


def runs(source: BlockRange, target: BlockRange) -> Iterator[CommonRun]:
    """List the elements of a tensor that two ranges of it have in common, as runs that are contiguous in both.

    Of ranges of one block there is at most one run. A block that is cut otherwise gives a run for each row.
    """
    if source.block == target.block:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            yield CommonRun(start - source.start, start - target.start, stop - start)
        return
    mine, theirs = [tuple([size for _, size in r.block]) for r in (source, target)]
    for a in rectangles(mine, source.start, source.stop):
        for b in rectangles(theirs, target.start, target.stop):
            yield from _common(source, mine, a, target, theirs, b)


def _common(
    source: BlockRange, mine: tuple[int, ...], a: Rectangle, target: BlockRange, theirs: tuple[int, ...], b: Rectangle
) -> Iterator[CommonRun]:
    """List the runs of the box in which two rectangles meet."""
    box = []
    for i, n, (x, _), j, m, (y, _) in zip(*a[:2], source.block, *b[:2], target.block, strict=True):
        box.append((max(i + x, j + y), min(i + n + x, j + m + y)))
    if any(low >= high for low, high in box):
        return
    d = len(box) - 1  # a run spans the dimensions from d on
    while d and box[d][1] - box[d][0] == mine[d] == theirs[d]:
        d -= 1
    numel = math.prod([high - low for low, high in box[d:]])
    for outer in itertools.product(*[range(low, high) for low, high in box[:d]]):
        first = (*outer, *[low for low, _ in box[d:]])
        yield CommonRun(_place(first, source, mine), _place(first, target, theirs), numel)


def _place(element: tuple[int, ...], within: BlockRange, shape: tuple[int, ...]) -> int:
    """Return where an element lies in a range; the element is given by its place along each dimension."""
    at = 0
    for i, (offset, _), size in zip(element, within.block, shape, strict=True):
        at = at * size + i - offset
    return at - within.start
