"""The sums of squares of each leaf's rows and of its columns, on any layout, and the way back to its elements.

A leaf `[.., r, c]` has sums of rows `[.., r]` and of columns `[.., c]`. A vector or a 0-d leaf has no columns, and each
element of it is a row. A rank holds a piece of a unit: it adds its squares to a vector of all sums of the unit. One
psum completes the vectors of all units. The vector holds each leaf's rows, then its columns, then the next leaf's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.collectives.sums import psum
from fzero.layout.boxes import Shard
from fzero.layout.segments import segment_ids
from fzero.layout.spec import facts, unit_index
from fzero.layout.units import CutUnit, cut_units
from fzero.optim._hyper import at_least_float32

__all__ = ["Sums", "column_shape", "row_shape", "spread", "sums_of_squares"]

Shape = tuple[int, ...]


class Sums(NamedTuple):
    """A leaf: where it stands in the flattened tree (tied: more than once), its shape, and its sums."""

    positions: list[int]
    shape: Shape
    rows: torch.Tensor
    columns: torch.Tensor | None


def row_shape(shape: Sequence[int]) -> Shape:
    """Return the shape of a leaf's sums of rows."""
    return tuple(shape[:-1] if len(shape) > 1 else shape)


def column_shape(shape: Sequence[int]) -> Shape | None:
    """Return the shape of a leaf's sums of columns, or None if it has none."""
    return (*shape[:-2], shape[-1]) if len(shape) > 1 else None


def sums_of_squares(paths: Sequence[str], entries: Sequence[Any]) -> list[Sums]:
    """Sum the squares of the rows and of the columns of each leaf of a flattened tree, in float32 at least.

    Raises:
        ValueError: if leaves are split over an axis: their rows or columns lie on several ranks.
    """
    return [*_sums_of_whole_leaves(entries), *_sums_of_units(cut_units(paths, entries))]


def _sums_of_whole_leaves(entries: Sequence[Any]) -> Iterator[Sums]:
    places: dict[Any, list[int]] = {}  # identity of a leaf -> positions
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            places.setdefault(tree.identity(x), []).append(position)
    for positions in places.values():
        square = at_least_float32(entries[positions[0]]).square()
        rows, columns = (square.sum(-1), square.sum(-2)) if square.ndim > 1 else (square, None)
        yield Sums(positions, tuple(square.shape), rows, columns)


def _sums_of_units(units: Sequence[CutUnit]) -> Iterator[Sums]:
    """Complete the vectors of all units that are sharded over the same axes by one psum."""
    along: dict[tuple[str, ...], list[CutUnit]] = {}
    for unit in units:
        known = facts(unit.uid)
        if known.split:
            raise ValueError(
                f"adafactor needs whole rows and columns, and leaves of unit {known.unit!r} are split over "
                f"{[split.axis for split in known.split]}: use an elementwise optimizer for them, or lamb"
            )
        along.setdefault(known.varies, []).append(unit)
    for axes, together in along.items():
        own = [_own_sums(unit.shard) for unit in together]
        totals = psum(torch.cat(own), axes).split([len(sums) for sums in own])
        for unit, total in zip(together, totals, strict=True):
            yield from _sums_of_leaves(unit, total)


def _own_sums(box: Shard) -> torch.Tensor:
    """Return this rank's part of the vector of sums of a unit."""
    squares, (row, column) = at_least_float32(box.data).square(), _places_of_sums(box)
    sums = squares.new_zeros(_length(facts(box.uid).shapes) + 1)  # the last takes elements without a sum
    return sums.index_add(0, row, squares).index_add(0, column, squares)[:-1]


def _sums_of_leaves(unit: CutUnit, sums: torch.Tensor) -> Iterator[Sums]:
    """Take a unit's vector of sums apart."""
    start = 0
    for index, shape in enumerate(facts(unit.uid).shapes):
        parts: list[torch.Tensor | None] = []
        for part in (row_shape(shape), column_shape(shape)):
            size = 0 if part is None else math.prod(part)
            parts.append(None if part is None else sums[start : start + size].view(part))
            start += size
        rows, columns = parts
        assert rows is not None
        yield Sums([position for position, i in unit.members if i == index], shape, rows, columns)


def spread(box: Shard, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return for each element of a shard the product of its row's number and its column's (1 if it has none): `[k]`.

    Args:
        box: the shard.
        rows: for each leaf of the unit a number for each row.
        columns: for each leaf a number for each column, or None.
    """
    parts = [x.flatten() for pair in zip(rows, columns, strict=True) for x in pair if x is not None]
    numbers = torch.cat([*parts, torch.ones(1, dtype=parts[0].dtype, device=parts[0].device)])
    row, column = _places_of_sums(box)
    return numbers[row] * numbers[column]


# ---------------------------------------------------------------- the vector of sums


class _LeafPlace(NamedTuple):
    """Where a leaf lies in its unit, and its sums in the unit's vector of sums.

    Attributes:
        offset: of its first element in the unit.
        width: the length of a row.
        area: the number of elements of a matrix.
        rows: the place of its first row's sum.
        columns: the place of its first column's sum; the end of the vector, if it has none.
    """

    offset: int
    width: int
    area: int
    rows: int
    columns: int


def _length(shapes: Sequence[Shape]) -> int:
    """Return the number of sums of a unit."""
    return sum([math.prod(row_shape(shape)) + math.prod(column_shape(shape) or (0,)) for shape in shapes])


def _leaf_places(shapes: Sequence[Shape]) -> list[_LeafPlace]:
    """Return the place of each leaf, and at last that of the padding, which has no sums."""
    end = _length(shapes)
    places, offset, start = [], 0, 0
    for shape in shapes:
        rows, columns = math.prod(row_shape(shape)), math.prod(column_shape(shape) or (0,))
        if len(shape) > 1:
            width, area = max(shape[-1], 1), max(shape[-2] * shape[-1], 1)
            places.append(_LeafPlace(offset, width, area, start, start + rows))
        else:
            places.append(_LeafPlace(offset, 1, 1, start, end))
        offset, start = offset + math.prod(shape), start + rows + columns
    return [*places, _LeafPlace(0, 1, 1, end, end)]


def _places_of_sums(box: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the sums of each element's row and of its column stand in the unit's vector: `[k]` each.

    Padding has no row, and elements of small leaves have no column: their place is the end of the vector.
    """
    device, k, shapes = box.data.device, facts(box.uid).shard_numel, facts(box.uid).shapes
    position = unit_index(box.uid).to(device) * k + torch.arange(k, device=device)
    table = torch.tensor([list(column) for column in zip(*_leaf_places(shapes), strict=True)], device=device)
    offset, width, area, rows, columns = table[:, segment_ids(box.uid, device)]  # table: [5, leaves + 1]
    inner, end = position - offset, _length(shapes)  # inner: the position in the leaf
    row = torch.where(rows == end, rows, rows + inner // width)
    column = torch.where(columns == end, columns, columns + inner // area * width + inner % width)
    return row, column
