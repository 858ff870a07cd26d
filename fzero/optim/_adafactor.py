"""Adafactor: Adam whose second moment of a matrix is kept as the means of its rows and of its columns."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.layout.boxes import Shard, is_box
from fzero.layout.segments import abstract, per_leaf
from fzero.layout.units import cut_units
from fzero.optim._base import Mask, Optimizer, Params, Updates
from fzero.optim._factored import Sums, column_shape, row_shape, spread, sums_of_squares
from fzero.optim._hyper import Number, at_least_float32, is_zero, nonnegative, positive
from fzero.optim._norms import leaf_rms
from fzero.optim._rate import check_rate, rate_at
from fzero.optim._words import answers
from fzero.optim.schedules import Schedule
from fzero.tree import Tree

__all__ = ["AdafactorState", "adafactor"]


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
