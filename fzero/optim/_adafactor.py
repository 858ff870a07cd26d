"""Adafactor: Adam whose second moment of a matrix is kept as the means of its rows and of its columns."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.layout.boxes import Shard, is_box
from fzero.layout.segments import abstract, per_leaf
from fzero.layout.units import cut_units
from fzero.optim._base import Optimizer
from fzero.optim._factored import column_shape, row_shape, spread, sums_of_squares
from fzero.optim._hyper import Number, at_least_float32, is_zero, nonnegative, positive
from fzero.optim._norms import leaf_rms
from fzero.optim._schedules import Schedule, check_rate, rate_at

__all__ = ["AdafactorState", "adafactor"]


class AdafactorState(NamedTuple):
    """The number of updates done (int64, 0-d), and means of squared gradients, whole on every rank.

    Of a leaf `[.., r, c]` they are `rows` `[.., r]` and `columns` `[.., c]`; of a smaller one `rows`, like the leaf.
    """

    count: torch.Tensor
    rows: Any
    columns: Any


def adafactor(
    learning_rate: Number | Schedule = 1e-2,
    decay_rate: Number = 0.8,
    eps: Number | None = None,
    eps_scale: Number = 1e-3,
    clipping_threshold: Number = 1.0,
    weight_decay: Number = 0.0,
    mask: Any = None,
) -> Optimizer:
    """Train in sublinear memory (arXiv:1804.04235): `torch.optim.Adafactor`'s numbers.

    The second moment of a matrix `[r, c]` is the product of the means of its rows and of its columns, r + c numbers in
    place of r c; there is no first moment. On shards the means are summed over the ranks, by one psum for the whole
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

    def init(params: Any) -> AdafactorState:
        rows, columns = _zeros(params)
        return AdafactorState(torch.zeros((), dtype=torch.int64), rows, columns)

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        if params is None:
            raise ValueError("adafactor needs the parameters: opt.update(grads, state, params)")
        count = state.count + 1
        t, rate = count.to(torch.float64), rate_at(learning_rate, state.count)
        steps, rows, columns = _directions(grads, state, t**-decay_rate, eps)
        size = (1 / t.sqrt()).clamp(max=rate)

        def step(u: torch.Tensor, p: torch.Tensor, step_rms: Any, rms: Any, decays: Any) -> torch.Tensor:
            excess = (step_rms / clipping_threshold).clamp(min=1)
            new = -size * rms.clamp(min=eps_scale) / excess * at_least_float32(u)
            return (new if is_zero(weight_decay) else new - rate * weight_decay * decays * p).to(p.dtype)

        decays = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
        updates = tree.map(step, steps, params, *leaf_rms((steps, params)), decays)
        return updates, AdafactorState(count, rows, columns)

    return Optimizer(init, update, elementwise=True)


def _zeros(params: Any) -> tuple[Any, Any]:
    """Return zero means for all leaves, whole; tied leaves share theirs."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    shapes = tree.flatten(abstract(params))[0]
    leaf: list[Any] = [id(x) for x in entries]  # what tells a leaf from another
    for uid, box, members in cut_units(paths, entries):
        for position, index in members:
            leaf[position] = (uid, id(box), index)
    made: dict[Any, Any] = {}
    for key, x, like in zip(leaf, entries, shapes, strict=True):
        if key not in made and like is not None:
            device = x.device if isinstance(x, torch.Tensor) else None
            parts = (row_shape(like.shape), column_shape(like.shape))
            made[key] = [None if s is None else torch.zeros(s, dtype=like.dtype, device=device) for s in parts]
    out = [[None if like is None else made[key][i] for key, like in zip(leaf, shapes, strict=True)] for i in (0, 1)]
    return tree.unflatten(structure, out[0]), tree.unflatten(structure, out[1])


def _directions(grads: Any, state: AdafactorState, weight: torch.Tensor, eps: Number | None) -> tuple[Any, Any, Any]:
    """Return gradients over the roots of their second moments, and the new means; `weight` is that of the new."""
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    rows, columns = tree.flatten(state.rows)[0], tree.flatten(state.columns)[0]
    out: list[Any] = list(entries)
    factors: list[Any] = [None] * len(entries)  # the second moment is a product: of rows and, of a matrix, columns
    for positions, shape, row_sums, column_sums in sums_of_squares(paths, entries):
        at = positions[0]
        least = torch.finfo(rows[at].dtype).eps if eps is None else eps
        if column_sums is None:
            row, column = _towards(rows[at], row_sums, weight), None
            pair = at_least_float32(row), None
        else:
            row = _towards(rows[at], row_sums / max(shape[-1], 1), weight)
            column = _towards(columns[at], column_sums / max(shape[-2], 1), weight)
            wide = at_least_float32(row)
            pair = wide / wide.mean(-1, keepdim=True).clamp(min=least), at_least_float32(column)
        direction = _whole_direction(entries[at], *pair, least) if isinstance(entries[at], torch.Tensor) else None
        for position in positions:
            rows[position], columns[position], factors[position] = row, column, (*pair, least)
            out[position] = entries[position] if direction is None else direction
    for uid, box, members in cut_units(paths, entries):
        of_leaf = dict(sorted([(i, factors[position]) for position, i in members], key=lambda pair: pair[0]))
        moment = spread(box, [rows for rows, _, _ in of_leaf.values()], [columns for _, columns, _ in of_leaf.values()])
        out[members[0][0]] = Shard(_over_root(box.data, moment, of_leaf[0][2]), uid)
    new = tree.unflatten(structure, rows), tree.unflatten(structure, columns)
    return tree.unflatten(structure, out), *new


def _towards(old: torch.Tensor, new: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (old + weight * (new - old)).to(old.dtype)


def _whole_direction(g: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | None, least: Any) -> torch.Tensor:
    return _over_root(g, rows if columns is None else rows[..., None] * columns[..., None, :], least)


def _over_root(g: torch.Tensor, moment: torch.Tensor, least: Any) -> torch.Tensor:
    return (at_least_float32(g) * moment.clamp(min=least * least).rsqrt()).to(g.dtype)
