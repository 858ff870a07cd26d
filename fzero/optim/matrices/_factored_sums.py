"""The sums of squares of each leaf's rows and columns, on any layout, and the way back to the leaf's elements."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._torch import tensor_on
from fzero.axes import axis_index
from fzero.collectives import psum
from fzero.sharding import Shard, ShardedUnit, leaf_ids, sharded_units, traced_spec, unit_index

__all__ = ["FactoredSums", "column_shape", "multiply_factors", "row_shape", "sums_of_squares"]


_Shape = tuple[int, ...]


class FactoredSums(NamedTuple):
    """A leaf's positions in the flattened tree (several if it is tied), its shape, and its sums."""

    positions: list[int]
    shape: _Shape
    rows: torch.Tensor
    columns: torch.Tensor | None


def row_shape(shape: Sequence[int]) -> _Shape:
    """Return the shape of a leaf's sums of rows."""
    return tuple(shape[:-1] if len(shape) > 1 else shape)


def column_shape(shape: Sequence[int]) -> _Shape | None:
    """Return the shape of a leaf's sums of columns, or None for a leaf without columns."""
    return (*shape[:-2], shape[-1]) if len(shape) > 1 else None


def sums_of_squares(paths: Sequence[str], entries: Sequence[Any]) -> list[FactoredSums]:
    """Return the sums of squares of each leaf's rows and columns in a flattened tree, in float32 or wider.

    Raises:
        ValueError: if each rank along an axis has other leaves, as in a pipeline, because no rank has the sums of all.
    """
    return [*_full_leaf_sums(entries), *_unit_sums(sharded_units(paths, entries))]


def _full_leaf_sums(entries: Sequence[Any]) -> Iterator[FactoredSums]:
    positions_by_leaf: dict[Any, list[int]] = {}  # identity of a leaf -> positions
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            positions_by_leaf.setdefault(tree.identity(x), []).append(position)
    for positions in positions_by_leaf.values():
        square = at_least_float32(entries[positions[0]]).square()
        rows, columns = (square.sum(-1), square.sum(-2)) if square.ndim > 1 else (square, None)
        yield FactoredSums(positions, tuple(square.shape), rows, columns)


def _unit_sums(units: Sequence[ShardedUnit]) -> Iterator[FactoredSums]:
    """Yield the sums of sharded leaves; one psum completes the vectors of all units over the same axes."""
    units_by_axes: dict[tuple[str, ...], list[ShardedUnit]] = {}
    for unit in units:
        spec = traced_spec(unit.spec_id)
        if stacked := [split.axis for split in spec.split if split.stacked]:
            raise ValueError(
                f"adafactor keeps the sums of all leaves on all ranks, and along {stacked} each rank has other leaves "
                f"of unit {spec.unit!r}: use an elementwise optimizer for them, or lamb"
            )
        units_by_axes.setdefault(spec.varies, []).append(unit)
    for axes, group in units_by_axes.items():
        vectors = [_local_sums(unit.shard) for unit in group]
        totals = psum(torch.cat(vectors), axes).split([len(sums) for sums in vectors])
        for unit, total in zip(group, totals, strict=True):
            yield from _split_unit_sums(unit, total)


def _local_sums(box: Shard) -> torch.Tensor:
    """Return the sums of squares of this rank's shard, as the unit's vector of sums."""
    squares, (row, column) = at_least_float32(box.data).square(), _sum_indices(box)
    # the last one collects elements without a sum
    sums = squares.new_zeros(_sum_count(traced_spec(box.spec_id).full_shapes) + 1)
    return sums.index_add(0, row, squares).index_add(0, column, squares)[:-1]


def _split_unit_sums(unit: ShardedUnit, sums: torch.Tensor) -> Iterator[FactoredSums]:
    """Split a unit's vector of sums into the sums of its leaves."""
    start = 0
    for index, shape in enumerate(traced_spec(unit.spec_id).full_shapes):
        parts: list[torch.Tensor | None] = []
        for part in (row_shape(shape), column_shape(shape)):
            size = 0 if part is None else math.prod(part)
            parts.append(None if part is None else sums[start : start + size].view(part))
            start += size
        rows, columns = parts
        assert rows is not None
        yield FactoredSums([position for position, i in unit.members if i == index], shape, rows, columns)


def multiply_factors(box: Shard, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return for each element of a shard the product of its row's number and its column's number: `[k]`.

    An element without a row or a column has the factor 1 in place of its number.

    Args:
        box: the shard.
        rows: for each leaf of the unit, a number for each row.
        columns: for each leaf, a number for each column, or None for a leaf without columns.
    """
    parts = [x.flatten() for pair in zip(rows, columns, strict=True) for x in pair if x is not None]
    numbers = torch.cat([*parts, torch.ones(1, dtype=parts[0].dtype, device=parts[0].device)])
    row, column = _sum_indices(box)
    return numbers[row] * numbers[column]


class _LeafRange(NamedTuple):
    """The range of a leaf in its unit, and the indices of its sums in the unit's vector of sums.

    Attributes:
        offset: the offset of the leaf's first element in the unit.
        width: the length of a row.
        area: the number of elements of a matrix.
        rows: the index of the first row's sum.
        columns: the index of the first column's sum; the end of the vector for a leaf without columns.
    """

    offset: int
    width: int
    area: int
    rows: int
    columns: int


def _sum_count(shapes: Sequence[_Shape]) -> int:
    """Return the number of sums of a unit."""
    return sum([math.prod(row_shape(shape)) + math.prod(column_shape(shape) or (0,)) for shape in shapes])


def _leaf_ranges(shapes: Sequence[_Shape]) -> list[_LeafRange]:
    """Return the range of each leaf, and the range of the padding last; the padding has no sums."""
    end = _sum_count(shapes)
    ranges = []
    offset = 0
    start = 0
    for shape in shapes:
        rows, columns = math.prod(row_shape(shape)), math.prod(column_shape(shape) or (0,))
        if len(shape) > 1:
            width, area = max(shape[-1], 1), max(shape[-2] * shape[-1], 1)
            ranges.append(_LeafRange(offset=offset, width=width, area=area, rows=start, columns=start + rows))
        else:
            ranges.append(_LeafRange(offset=offset, width=1, area=1, rows=start, columns=end))
        offset, start = offset + math.prod(shape), start + rows + columns
    return [*ranges, _LeafRange(offset=0, width=1, area=1, rows=end, columns=end)]


def _sum_indices(box: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each element of a shard the indices of its row's and column's sums in the unit's vector: `[k]` each.

    Padding has no row, and elements of vectors and 0-d leaves have no column. Then the index is the end of the vector.
    """
    device, k, shapes = box.data.device, traced_spec(box.spec_id).shard_numel, traced_spec(box.spec_id).shapes
    position = unit_index(box.spec_id, device) * k + torch.arange(k, device=device)
    table = tensor_on([list(column) for column in zip(*_leaf_ranges(shapes), strict=True)], device=device)
    offset, width, area, rows, columns = table[:, leaf_ids(box.spec_id, device)]  # table: [5, leaves + 1]
    inner, end = position - offset, _sum_count(shapes)  # inner: the position in the leaf
    row = torch.where(rows == end, rows, rows + inner // width)
    column = torch.where(columns == end, columns, columns + inner // area * width + inner % width)
    if not traced_spec(box.spec_id).split:
        return row, column
    in_full = _full_indices(box)
    return in_full[row], in_full[column]


def _full_indices(box: Shard) -> torch.Tensor:
    """Return for each sum of this rank's parts of split leaves its index in the vector of full leaves' sums."""
    spec, device = traced_spec(box.spec_id), box.data.device
    indices: list[torch.Tensor] = []
    start = 0
    for i, (part, full) in enumerate(zip(spec.shapes, spec.full_shapes, strict=True)):
        firsts = [torch.zeros((), dtype=torch.int64, device=device) for _ in part]  # the part's place in each dimension
        for split in spec.split:
            firsts[split.dims[i]] = firsts[split.dims[i]] * split.size + axis_index(split.axis, device=device)
        for dims in _sum_dims(len(part)):
            indices.append(start + _flat_indices(dims, part, full, firsts, device))
            start += math.prod([full[d] for d in dims])
    return torch.cat([*indices, torch.full((1,), start, device=device)])


def _sum_dims(ndim: int) -> Sequence[Sequence[int]]:
    """Return the dimensions over which the sums of a leaf range: those of its rows and of its columns."""
    if ndim < 2:
        return [range(ndim)]
    *outer, last = range(ndim)
    return [outer, [*outer[:-1], last]]


def _flat_indices(
    dims: Sequence[int],
    part: Sequence[int],
    full: Sequence[int],
    firsts: Sequence[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the flat indices of a part's elements in the full tensor, of these dimensions alone."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for d in dims:
        places = firsts[d] * part[d] + torch.arange(part[d], device=device)
        index = index[..., None] * full[d] + places
    return index.flatten()
