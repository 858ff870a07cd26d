"""The sums of squares of each leaf's rows and of its columns, on any layout, and the way back to its elements.

A leaf `[.., r, c]` has sums of rows `[.., r]` and of columns `[.., c]`; a vector or a 0-d leaf has no columns, and each
element of it is a row. A rank holds a piece of a unit, so it adds what it has to a vector of all sums of the unit, and
one psum completes the vectors of all units.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.collectives.sums import psum
from fzero.layout.boxes import Shard
from fzero.layout.segments import segment_ids
from fzero.layout.spec import facts, unit_index
from fzero.layout.units import cut_units
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
    plain: dict[Any, list[int]] = {}  # identity of a leaf -> positions
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            plain.setdefault(tree.identity(x), []).append(position)
    found = []
    for positions in plain.values():
        square = at_least_float32(entries[positions[0]]).square()
        rows, columns = (square.sum(-1), square.sum(-2)) if square.ndim > 1 else (square, None)
        found.append(Sums(positions, tuple(square.shape), rows, columns))

    own: dict[tuple[str, ...], list[tuple[torch.Tensor, Any]]] = {}  # axes -> of each unit its vector, and members
    for uid, box, members in cut_units(paths, entries):
        if facts(uid).split:
            raise ValueError(
                f"adafactor needs whole rows and columns, and leaves of unit {facts(uid).unit!r} are split over "
                f"{[split.axis for split in facts(uid).split]}: use an elementwise optimizer for them, or lamb"
            )
        own.setdefault(facts(uid).varies, []).append((_own_sums(box), (uid, members)))
    for axes, units in own.items():
        totals = psum(torch.cat([sums for sums, _ in units]), axes).split([len(sums) for sums, _ in units])
        for total, (_, (uid, members)) in zip(totals, units, strict=True):
            for index, (rows, columns) in enumerate(_cut(total, facts(uid).shapes)):
                positions = [position for position, i in members if i == index]
                found.append(Sums(positions, facts(uid).shapes[index], rows, columns))
    return found


def spread(box: Shard, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return for each element of a shard the product of its row's number and its column's (1 if it has none): `[k]`.

    Args:
        box: the shard.
        rows: for each leaf of the unit a number for each row.
        columns: for each leaf a number for each column, or None.
    """
    parts = [x.flatten() for pair in zip(rows, columns, strict=True) for x in pair if x is not None]
    table = torch.cat([*parts, torch.ones(1, dtype=parts[0].dtype, device=parts[0].device)])
    row, column = _slots(box)
    return table[row] * table[column]


def _own_sums(box: Shard) -> torch.Tensor:
    """Return this rank's part of the sums of a unit: each leaf's rows, then its columns, then the next leaf's."""
    squares, (row, column) = at_least_float32(box.data).square(), _slots(box)
    sums = squares.new_zeros(_table(facts(box.uid).shapes)[1] + 1)
    return sums.index_add(0, row, squares).index_add(0, column, squares)[:-1]


def _cut(sums: torch.Tensor, shapes: Sequence[Shape]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    out, start = [], 0
    for shape in shapes:
        pair: list[torch.Tensor | None] = []
        for part in (row_shape(shape), column_shape(shape)):
            size = 0 if part is None else math.prod(part)
            pair.append(None if part is None else sums[start : start + size].view(part))
            start += size
        out.append((pair[0], pair[1]))
    return out


def _slots(box: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each element's row and column stand in the unit's vector of sums; at its end if nowhere: `[k]` each.

    Padding has no row, and elements of small leaves have no column.
    """
    device, k = box.data.device, facts(box.uid).shard_numel
    table, nowhere = _table(facts(box.uid).shapes)
    position = unit_index(box.uid).to(device) * k + torch.arange(k, device=device)
    offset, width, area, rows, columns = torch.tensor(table, device=device)[:, segment_ids(box.uid, device)]
    inner = position - offset  # the position in the leaf
    row = torch.where(rows == nowhere, rows, rows + inner // width)
    column = torch.where(columns == nowhere, columns, columns + inner // area * width + inner % width)
    return row, column


def _table(shapes: Sequence[Shape]) -> tuple[list[list[int]], int]:
    """Return offset, width, area of the last two dimensions, first row and first column of each leaf, and the end.

    The table is `[5, leaves + 1]`: its last entry is the padding's.
    """
    entries, offset, slot = [], 0, 0
    for shape in shapes:
        rows, columns = math.prod(row_shape(shape)), math.prod(column_shape(shape) or (0,))
        width, area = (shape[-1], shape[-2] * shape[-1]) if len(shape) > 1 else (1, 1)
        first_column = slot + rows if len(shape) > 1 else -1
        entries.append([offset, max(width, 1), max(area, 1), slot, first_column])
        offset, slot = offset + math.prod(shape), slot + rows + columns
    entries.append([0, 1, 1, slot, slot])
    return [[slot if x < 0 else x for x in column] for column in zip(*entries, strict=True)], slot
