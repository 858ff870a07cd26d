"""Adafactor: Adam that stores a matrix's second moment as means over its rows and columns."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._torch import tensor_on
from fzero.axes import axis_index
from fzero.collectives import psum
from fzero.optim._base import Mask, Optimizer, Params, Updates, check_mask, check_mask_fits
from fzero.optim._hyperparams import Scalar, check_nonnegative, check_positive, check_rate, is_zero, lerp, rate_at
from fzero.optim._norms import leaf_rms
from fzero.optim._schedules import Schedule
from fzero.optim.checks import REMEDIES, torch_hints
from fzero.sharding import (
    Shard,
    ShardedUnit,
    abstract,
    is_box,
    per_leaf,
    segment_ids,
    sharded_units,
    traced_spec,
    unit_index,
)
from fzero.tree import Tree

__all__ = ["AdafactorState", "adafactor"]

# The sums of squares of each leaf's rows and columns, on any layout, and the way back to the leaf's elements.
#
# A leaf `[.., r, c]` has sums of rows `[.., r]` and of columns `[.., c]`. A vector or a 0-d leaf has no columns, and
# each of its elements is a row. A unit has one vector of sums: the first leaf's rows, its columns, the next leaf's rows
# and so on. Each rank adds the squares of its shard to this vector, and one psum completes the vectors of all units.
# The vector is of full leaves, those of tensor parallelism too: a rank adds its part at the part's rows and columns.


_Shape = tuple[int, ...]


class _Sums(NamedTuple):
    """A leaf's positions in the flattened tree (several if it is tied), its shape, and its sums."""

    positions: list[int]
    shape: _Shape
    rows: torch.Tensor
    columns: torch.Tensor | None


def _row_shape(shape: Sequence[int]) -> _Shape:
    """Return the shape of a leaf's sums of rows."""
    return tuple(shape[:-1] if len(shape) > 1 else shape)


def _column_shape(shape: Sequence[int]) -> _Shape | None:
    """Return the shape of a leaf's sums of columns, or None for a leaf without columns."""
    return (*shape[:-2], shape[-1]) if len(shape) > 1 else None


def _sums_of_squares(paths: Sequence[str], entries: Sequence[Any]) -> list[_Sums]:
    """Return the sums of squares of each leaf's rows and columns in a flattened tree, in float32 or wider.

    Raises:
        ValueError: if each rank along an axis has other leaves, as in a pipeline, because no rank has the sums of all.
    """
    return [*_sums_of_full_leaves(entries), *_sums_of_units(sharded_units(paths, entries))]


def _sums_of_full_leaves(entries: Sequence[Any]) -> Iterator[_Sums]:
    positions_by_leaf: dict[Any, list[int]] = {}  # identity of a leaf -> positions
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            positions_by_leaf.setdefault(tree.identity(x), []).append(position)
    for positions in positions_by_leaf.values():
        square = at_least_float32(entries[positions[0]]).square()
        rows, columns = (square.sum(-1), square.sum(-2)) if square.ndim > 1 else (square, None)
        yield _Sums(positions, tuple(square.shape), rows, columns)


def _sums_of_units(units: Sequence[ShardedUnit]) -> Iterator[_Sums]:
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
            yield from _sums_of_leaves(unit, total)


def _local_sums(box: Shard) -> torch.Tensor:
    """Return the sums of squares of this rank's shard, as the unit's vector of sums."""
    squares, (row, column) = at_least_float32(box.data).square(), _indices_of_sums(box)
    # the last one collects elements without a sum
    sums = squares.new_zeros(_length(traced_spec(box.spec_id).full_shapes) + 1)
    return sums.index_add(0, row, squares).index_add(0, column, squares)[:-1]


def _sums_of_leaves(unit: ShardedUnit, sums: torch.Tensor) -> Iterator[_Sums]:
    """Split a unit's vector of sums into the sums of its leaves."""
    start = 0
    for index, shape in enumerate(traced_spec(unit.spec_id).full_shapes):
        parts: list[torch.Tensor | None] = []
        for part in (_row_shape(shape), _column_shape(shape)):
            size = 0 if part is None else math.prod(part)
            parts.append(None if part is None else sums[start : start + size].view(part))
            start += size
        rows, columns = parts
        assert rows is not None
        yield _Sums([position for position, i in unit.members if i == index], shape, rows, columns)


def _product_of_factors(
    box: Shard, rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return for each element of a shard the product of its row's number and its column's number: `[k]`.

    An element without a row or a column has the factor 1 in place of its number.

    Args:
        box: the shard.
        rows: for each leaf of the unit, a number for each row.
        columns: for each leaf, a number for each column, or None for a leaf without columns.
    """
    parts = [x.flatten() for pair in zip(rows, columns, strict=True) for x in pair if x is not None]
    numbers = torch.cat([*parts, torch.ones(1, dtype=parts[0].dtype, device=parts[0].device)])
    row, column = _indices_of_sums(box)
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


def _length(shapes: Sequence[_Shape]) -> int:
    """Return the number of sums of a unit."""
    return sum([math.prod(_row_shape(shape)) + math.prod(_column_shape(shape) or (0,)) for shape in shapes])


def _leaf_ranges(shapes: Sequence[_Shape]) -> list[_LeafRange]:
    """Return the range of each leaf, and the range of the padding last; the padding has no sums."""
    end = _length(shapes)
    ranges = []
    offset = 0
    start = 0
    for shape in shapes:
        rows, columns = math.prod(_row_shape(shape)), math.prod(_column_shape(shape) or (0,))
        if len(shape) > 1:
            width, area = max(shape[-1], 1), max(shape[-2] * shape[-1], 1)
            ranges.append(_LeafRange(offset=offset, width=width, area=area, rows=start, columns=start + rows))
        else:
            ranges.append(_LeafRange(offset=offset, width=1, area=1, rows=start, columns=end))
        offset, start = offset + math.prod(shape), start + rows + columns
    return [*ranges, _LeafRange(offset=0, width=1, area=1, rows=end, columns=end)]


def _indices_of_sums(box: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each element of a shard the indices of its row's and column's sums in the unit's vector: `[k]` each.

    Padding has no row, and elements of vectors and 0-d leaves have no column. Then the index is the end of the vector.
    """
    device, k, shapes = box.data.device, traced_spec(box.spec_id).shard_numel, traced_spec(box.spec_id).shapes
    position = unit_index(box.spec_id, device) * k + torch.arange(k, device=device)
    table = tensor_on([list(column) for column in zip(*_leaf_ranges(shapes), strict=True)], device=device)
    offset, width, area, rows, columns = table[:, segment_ids(box.spec_id, device)]  # table: [5, leaves + 1]
    inner, end = position - offset, _length(shapes)  # inner: the position in the leaf
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
        *outer, last = range(len(part)) if part else [0]
        for dims in (outer, [*outer[:-1], last]) if outer else (range(len(part)),):  # of rows, of columns
            index = torch.zeros((), dtype=torch.int64, device=device)
            for d in dims:
                places = firsts[d] * part[d] + torch.arange(part[d], device=device)
                index = index[..., None] * full[d] + places
            indices.append(start + index.flatten())
            start += math.prod([full[d] for d in dims])
    return torch.cat([*indices, torch.full((1,), start, device=device)])


class AdafactorState(NamedTuple):
    """The number of updates (int64, 0-d), and means of squared gradients, replicated on all ranks.

    A leaf `[.., r, c]` has `rows` `[.., r]` and `columns` `[.., c]`; a vector or 0-d leaf has `rows` of its own shape.
    """

    count: torch.Tensor
    rows: Tree
    columns: Tree


@torch_hints
def adafactor(
    learning_rate: Scalar | Schedule = 1e-2,
    decay_rate: Scalar = 0.8,
    eps: Scalar | None = None,
    eps_scale: Scalar = 1e-3,
    clipping_threshold: Scalar = 1.0,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Train in sublinear memory (arXiv:1804.04235): `torch.optim.Adafactor`'s numbers.

    The second moment of a matrix `[r, c]` is the product of the means of its rows and columns: r + c numbers instead of
    r c. There is no first moment. On shards one psum per set of axes sums the means over the ranks. Every rank stores
    all means, which are small: those of full leaves, where tensor or expert parallelism splits leaves. The root mean
    squares of the leaves take a second psum.

    Args:
        learning_rate: a number, or a schedule: the size of a step relative to the size of the leaf. At update t the
            relative size is at most 1/sqrt(t).
        decay_rate: the decay of the means: at update t the new means have the weight t^-decay_rate.
        eps: a lower bound of the mean that is divided by, and of the second moment's root; by default the dtype's eps.
        eps_scale: a lower bound of the leaf's root mean square, by which the step is multiplied.
        clipping_threshold: the largest root mean square of a step before this multiplication.
        weight_decay: the fraction of a parameter, times the rate, that is subtracted in each update.
        mask: which leaves decay; see `add_decayed_weights`.

    Returns:
        An optimizer; its state has the parameters' dtypes.

    Raises:
        ValueError: if a hyperparameter is out of its range; on update, if `params` is not given.

    Example:
        >>> opt = adafactor(0.1)
        >>> params = {"w": torch.ones(2, 3)}
        >>> state = opt.init(params)
        >>> state.rows["w"].shape, state.columns["w"].shape
        (torch.Size([2]), torch.Size([3]))
        >>> opt.update({"w": torch.ones(2, 3)}, state, params)[0]["w"][0]
        tensor([-0.1000, -0.1000, -0.1000])
    """
    check_rate(learning_rate)
    check_mask(mask)
    check_nonnegative(decay_rate=decay_rate, eps_scale=eps_scale, weight_decay=weight_decay)
    check_positive(clipping_threshold=clipping_threshold)
    if eps is not None:
        check_nonnegative(eps=eps)

    def init(params: Params) -> AdafactorState:
        check_mask_fits(mask, params)
        rows, columns = _zeros(params)
        return AdafactorState(torch.zeros((), dtype=torch.int64, device="cpu"), rows, columns)

    def update(grads: Updates, state: AdafactorState, params: Params | None = None) -> tuple[Updates, AdafactorState]:
        """Return the updates and the state after one step of Adafactor."""
        if params is None:
            raise ValueError("adafactor needs the parameters: opt.update(grads, state, params)")
        count = state.count + 1
        t, rate = count.to(torch.float64), rate_at(learning_rate, state.count)
        steps, rows, columns = _directions(grads, state, t**-decay_rate, eps)
        size = (1 / t.sqrt()).clamp(max=rate)

        def step(
            u: torch.Tensor, p: torch.Tensor, step_rms: torch.Tensor, rms: torch.Tensor, decays: Any
        ) -> torch.Tensor:
            excess = (step_rms / clipping_threshold).clamp(min=1)
            new = -size * rms.clamp(min=eps_scale) / excess * at_least_float32(u)
            return (new if is_zero(weight_decay) else new - rate * weight_decay * decays * p).to(p.dtype)

        decays = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
        updates = tree.map(step, steps, params, *leaf_rms((steps, params)), decays)
        return updates, AdafactorState(count, rows, columns)

    return Optimizer(init, update, exact_on_shards=True, elementwise=False)


def _zeros(params: Params) -> tuple[Tree, Tree]:
    """Return zero means of the rows and of the columns of all leaves; tied leaves share one tensor."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    shapes = tree.flatten(abstract(params))[0]
    keys: list[Any] = [id(x) for x in entries]  # the identity of each leaf
    devices = [x.device if isinstance(x, torch.Tensor) else None for x in entries]
    for spec_id, box, members in sharded_units(paths, entries):
        for position, index in members:
            keys[position], devices[position] = (spec_id, id(box), index), box.data.device
    zeros: dict[Any, tuple[torch.Tensor, torch.Tensor | None]] = {}
    rows: list[Any] = [None] * len(entries)
    columns: list[Any] = [None] * len(entries)
    for position, (key, device, like) in enumerate(zip(keys, devices, shapes, strict=True)):
        if like is None:
            continue
        if key not in zeros:
            zeros[key] = _zeros_like(like, device)
        rows[position], columns[position] = zeros[key]
    return tree.unflatten(structure, rows), tree.unflatten(structure, columns)


def _zeros_like(like: torch.Tensor, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    columns = _column_shape(like.shape)
    rows = torch.zeros(_row_shape(like.shape), dtype=like.dtype, device=device)
    return rows, None if columns is None else torch.zeros(columns, dtype=like.dtype, device=device)


class _Factors(NamedTuple):
    """A second moment as a product of factors for rows and columns (None for a leaf that is not a matrix).

    Its root is at least `min_root`.
    """

    rows: torch.Tensor
    columns: torch.Tensor | None
    min_root: Scalar


def _directions(
    grads: Updates, state: AdafactorState, weight: torch.Tensor, eps: Scalar | None
) -> tuple[Updates, Tree, Tree]:
    """Return gradients divided by the roots of their second moments, and the new means, of rows and of columns.

    `weight` is the weight of the new squares in the means.
    """
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    rows, columns = (tree.leaves_up_to(grads, means, is_box) for means in (state.rows, state.columns))
    out: list[Any] = list(entries)
    factors: list[Any] = [None] * len(entries)
    for sums in _sums_of_squares(paths, entries):
        first = sums.positions[0]
        _check_means(paths[first], sums, rows[first], columns[first])
        row, column = _new_means(sums, rows[first], columns[first], weight)
        leaf_factors = _factors(row, column, torch.finfo(rows[first].dtype).eps if eps is None else eps)
        direction = _full_direction(entries[first], leaf_factors) if isinstance(entries[first], torch.Tensor) else None
        for position in sums.positions:
            rows[position], columns[position], factors[position] = row, column, leaf_factors
            out[position] = entries[position] if direction is None else direction
    for spec_id, box, members in sharded_units(paths, entries):
        by_index = {index: factors[position] for position, index in members}
        unit_factors: list[_Factors] = [by_index[index] for index in sorted(by_index)]
        moment = _product_of_factors(box, [f.rows for f in unit_factors], [f.columns for f in unit_factors])
        out[members[0][0]] = Shard(_over_root(box.data, moment, unit_factors[0].min_root), spec_id)
    new = tree.unflatten(structure, rows), tree.unflatten(structure, columns)
    return tree.unflatten(structure, out), *new


def _check_means(path: str, sums: _Sums, rows: torch.Tensor, columns: torch.Tensor | None) -> None:
    """Check that the state of a leaf has the leaf's numbers of rows and columns."""
    for name, mean, new in (("rows", rows, sums.rows), ("columns", columns, sums.columns)):
        shape, expected = (None if x is None else [*x.shape] for x in (mean, new))
        if shape != expected:
            raise ValueError(
                f"opt.update: gradient leaf {path!r} is {[*sums.shape]}, and its state has {name} of shape {shape}: "
                f"expected {expected}; {REMEDIES['state']}"
            )


def _new_means(
    sums: _Sums, rows: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move the means of a leaf's rows and columns towards the means of the new squares."""
    if sums.columns is None:
        return lerp(rows, sums.rows, weight), None
    row_means, column_means = sums.rows / max(sums.shape[-1], 1), sums.columns / max(sums.shape[-2], 1)
    return lerp(rows, row_means, weight), lerp(columns, column_means, weight)


def _factors(rows: torch.Tensor, columns: torch.Tensor | None, min_root: Scalar) -> _Factors:
    wide = at_least_float32(rows)
    if columns is None:
        return _Factors(wide, None, min_root)
    return _Factors(wide / wide.mean(-1, keepdim=True).clamp(min=min_root), at_least_float32(columns), min_root)


def _full_direction(g: torch.Tensor, factors: _Factors) -> torch.Tensor:
    rows, columns, min_root = factors
    return _over_root(g, rows if columns is None else rows[..., None] * columns[..., None, :], min_root)


def _over_root(g: torch.Tensor, moment: torch.Tensor, min_root: Any) -> torch.Tensor:
    return (at_least_float32(g) * moment.clamp(min=min_root * min_root).rsqrt()).to(g.dtype)
