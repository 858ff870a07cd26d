"""Adafactor: Adam whose second moment of a matrix is kept as the means of its rows and of its columns."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.collectives import psum
from fzero.optim._base import (
    Mask,
    Number,
    Optimizer,
    Params,
    Updates,
    answers,
    at_least_float32,
    check_rate,
    is_zero,
    nonnegative,
    positive,
    rate_at,
)
from fzero.optim._norms import leaf_rms
from fzero.optim.schedules import Schedule
from fzero.sharding import CutUnit, Shard, abstract, cut_units, facts, is_box, per_leaf, segment_ids, unit_index
from fzero.tree import Tree

__all__ = ["AdafactorState", "Sums", "adafactor", "column_shape", "row_shape", "spread", "sums_of_squares"]

# The sums of squares of each leaf's rows and of its columns, on any layout, and the way back to its elements.
#
# A leaf `[.., r, c]` has sums of rows `[.., r]` and of columns `[.., c]`. A vector or a 0-d leaf has no columns, and
# each element of it is a row. A rank holds a piece of a unit: it adds its squares to a vector of all sums of the unit.
# One psum completes the vectors of all units. The vector holds each leaf's rows, then its columns, then the next
# leaf's.


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


class AdafactorState(NamedTuple):
    """The number of updates done (int64, 0-d), and means of squared gradients, whole on every rank.

    Of a leaf `[.., r, c]` they are `rows` `[.., r]` and `columns` `[.., c]`; of a smaller one `rows`, like the leaf.
    """

    count: torch.Tensor
    rows: Tree
    columns: Tree


@answers
def adafactor(
    learning_rate: Number | Schedule = 1e-2,
    decay_rate: Number = 0.8,
    eps: Number | None = None,
    eps_scale: Number = 1e-3,
    clipping_threshold: Number = 1.0,
    weight_decay: Number = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Train in sublinear memory (arXiv:1804.04235): `torch.optim.Adafactor`'s numbers.

    The second moment of a matrix `[r, c]` is the product of the means of its rows and of its columns: r + c numbers in
    place of r c. There is no first moment. On shards the means are summed over the ranks, by one psum for the whole
    tree, and kept whole on each: they are small. The leaves' root mean squares take a second one.

    Args:
        learning_rate: a number, or a schedule: the size of a step relative to the leaf's; at update t it is at most
            1/sqrt(t).
        decay_rate: how fast the means forget: at update t the new ones weigh t^-decay_rate.
        eps: the least mean that is divided by, and the root of the least second moment; by default the dtype's.
        eps_scale: the least root mean square of a leaf that its step is multiplied by.
        clipping_threshold: the largest root mean square of a step before that.
        weight_decay: the fraction of a parameter, times the rate, that is taken off each update.
        mask: which leaves decay; see `add_decayed_weights`.

    Returns:
        A pair; its state is of the parameter's dtype.

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
    nonnegative(decay_rate=decay_rate, eps_scale=eps_scale, weight_decay=weight_decay)
    positive(clipping_threshold=clipping_threshold)
    if eps is not None:
        nonnegative(eps=eps)

    def init(params: Params) -> AdafactorState:
        rows, columns = _zeros(params)
        return AdafactorState(torch.zeros((), dtype=torch.int64), rows, columns)

    def update(grads: Updates, state: AdafactorState, params: Params | None = None) -> tuple[Updates, AdafactorState]:
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

    return Optimizer(init, update, elementwise=True, pointwise=False)


def _zeros(params: Params) -> tuple[Tree, Tree]:
    """Return zero means for all leaves, whole; tied leaves share theirs."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    shapes = tree.flatten(abstract(params))[0]
    leaf: list[Any] = [id(x) for x in entries]  # a leaf's identity
    for uid, box, members in cut_units(paths, entries):
        for position, index in members:
            leaf[position] = (uid, id(box), index)
    made: dict[Any, tuple[torch.Tensor, torch.Tensor | None]] = {}
    rows: list[Any] = [None] * len(entries)
    columns: list[Any] = [None] * len(entries)
    for position, (key, x, like) in enumerate(zip(leaf, entries, shapes, strict=True)):
        if like is None:
            continue
        if key not in made:
            made[key] = _zeros_like(like, x.device if isinstance(x, torch.Tensor) else None)
        rows[position], columns[position] = made[key]
    return tree.unflatten(structure, rows), tree.unflatten(structure, columns)


def _zeros_like(like: torch.Tensor, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    of_columns = column_shape(like.shape)
    rows = torch.zeros(row_shape(like.shape), dtype=like.dtype, device=device)
    return rows, None if of_columns is None else torch.zeros(of_columns, dtype=like.dtype, device=device)


class _Factors(NamedTuple):
    """A second moment as a product of rows and, of a matrix, columns; its root is at least `least`."""

    rows: torch.Tensor
    columns: torch.Tensor | None
    least: Number


def _directions(
    grads: Updates, state: AdafactorState, weight: torch.Tensor, eps: Number | None
) -> tuple[Updates, Tree, Tree]:
    """Return gradients over the roots of their second moments, and the new means; `weight` is that of the new."""
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    rows, columns = tree.flatten(state.rows)[0], tree.flatten(state.columns)[0]
    out: list[Any] = list(entries)
    factors: list[Any] = [None] * len(entries)
    for sums in sums_of_squares(paths, entries):
        at = sums.positions[0]
        row, column = _new_means(sums, rows[at], columns[at], weight)
        found = _factors(row, column, torch.finfo(rows[at].dtype).eps if eps is None else eps)
        direction = _whole_direction(entries[at], found) if isinstance(entries[at], torch.Tensor) else None
        for position in sums.positions:
            rows[position], columns[position], factors[position] = row, column, found
            out[position] = entries[position] if direction is None else direction
    for uid, box, members in cut_units(paths, entries):
        by_index = {index: factors[position] for position, index in members}
        of_leaf: list[_Factors] = [by_index[index] for index in sorted(by_index)]
        moment = spread(box, [f.rows for f in of_leaf], [f.columns for f in of_leaf])
        out[members[0][0]] = Shard(_over_root(box.data, moment, of_leaf[0].least), uid)
    new = tree.unflatten(structure, rows), tree.unflatten(structure, columns)
    return tree.unflatten(structure, out), *new


def _new_means(
    sums: Sums, rows: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move the means of a leaf's rows and columns towards those of new squares."""
    if sums.columns is None:
        return _towards(rows, sums.rows, weight), None
    row_means, column_means = sums.rows / max(sums.shape[-1], 1), sums.columns / max(sums.shape[-2], 1)
    return _towards(rows, row_means, weight), _towards(columns, column_means, weight)


def _factors(rows: torch.Tensor, columns: torch.Tensor | None, least: Number) -> _Factors:
    wide = at_least_float32(rows)
    if columns is None:
        return _Factors(wide, None, least)
    return _Factors(wide / wide.mean(-1, keepdim=True).clamp(min=least), at_least_float32(columns), least)


def _towards(old: torch.Tensor, new: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (old + weight * (new - old)).to(old.dtype)


def _whole_direction(g: torch.Tensor, factors: _Factors) -> torch.Tensor:
    rows, columns, least = factors
    return _over_root(g, rows if columns is None else rows[..., None] * columns[..., None, :], least)


def _over_root(g: torch.Tensor, moment: torch.Tensor, least: Any) -> torch.Tensor:
    return (at_least_float32(g) * moment.clamp(min=least * least).rsqrt()).to(g.dtype)
