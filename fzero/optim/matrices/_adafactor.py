"""Adafactor: Adam that stores a matrix's second moment as means over its rows and columns."""

from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero.optim._base import Mask, Optimizer, Params, Updates, check_mask, check_mask_fits, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_nonnegative, check_positive, check_rate, is_zero, lerp, rate_at
from fzero.optim._norms import leaf_rms
from fzero.optim._schedules import Schedule
from fzero.optim.checks import REMEDIES, torch_hints
from fzero.optim.matrices._factored_sums import (
    FactoredSums,
    column_shape,
    multiply_factors,
    row_shape,
    sums_of_squares,
)
from fzero.sharding import Shard, abstract, is_box, per_leaf, sharded_units
from fzero.tree import Tree

__all__ = ["AdafactorState", "adafactor"]


class AdafactorState(NamedTuple):
    """The number of updates (int64, 0-d), and means of squared gradients, replicated on all ranks.

    A leaf `[.., r, c]` has `rows` `[.., r]` and `columns` `[.., c]`; a vector or 0-d leaf has `rows` of its own shape.
    """

    count: torch.Tensor
    rows: Tree
    columns: Tree


@torch_hints
@optimizer_factory
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
        rows, columns = _zero_means(params)
        return AdafactorState(torch.zeros((), dtype=torch.int64, device="cpu"), rows, columns)

    def update(grads: Updates, state: AdafactorState, params: Params | None = None) -> tuple[Updates, AdafactorState]:
        """Return the updates and the state after one step of Adafactor."""
        if params is None:
            raise ValueError("adafactor needs the parameters: opt.update(grads, state, params)")
        count = state.count + 1
        t, rate = count.to(torch.float64), rate_at(learning_rate, state.count)
        steps, rows, columns = _normalize_updates(grads, state, t**-decay_rate, eps)
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


def _zero_means(params: Params) -> tuple[Tree, Tree]:
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
    columns = column_shape(like.shape)
    rows = torch.zeros(row_shape(like.shape), dtype=like.dtype, device=device)
    return rows, None if columns is None else torch.zeros(columns, dtype=like.dtype, device=device)


class _Factors(NamedTuple):
    """A second moment as a product of factors for rows and columns (None for a leaf that is not a matrix).

    Its root is at least `min_root`.
    """

    rows: torch.Tensor
    columns: torch.Tensor | None
    min_root: Scalar


def _normalize_updates(
    grads: Updates, state: AdafactorState, weight: torch.Tensor, eps: Scalar | None
) -> tuple[Updates, Tree, Tree]:
    """Return gradients divided by the roots of their second moments, and the new means, of rows and of columns.

    `weight` is the weight of the new squares in the means.
    """
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    rows, columns = (tree.leaves_up_to(grads, means, is_box) for means in (state.rows, state.columns))
    out: list[Any] = list(entries)
    factors: list[Any] = [None] * len(entries)
    for sums in sums_of_squares(paths, entries):
        index = sums.positions[0]
        _check_means(paths[index], sums, rows[index], columns[index])
        row, column = _new_means(sums, rows[index], columns[index], weight)
        leaf_factors = _root_factors(row, column, torch.finfo(rows[index].dtype).eps if eps is None else eps)
        direction = _full_direction(entries[index], leaf_factors) if isinstance(entries[index], torch.Tensor) else None
        for position in sums.positions:
            rows[position], columns[position], factors[position] = row, column, leaf_factors
            out[position] = entries[position] if direction is None else direction
    for spec_id, box, members in sharded_units(paths, entries):
        by_index = {index: factors[position] for position, index in members}
        unit_factors: list[_Factors] = [by_index[index] for index in sorted(by_index)]
        moment = multiply_factors(box, [f.rows for f in unit_factors], [f.columns for f in unit_factors])
        out[members[0][0]] = Shard(_divide_by_root(box.data, moment, unit_factors[0].min_root), spec_id)
    new = tree.unflatten(structure, rows), tree.unflatten(structure, columns)
    return tree.unflatten(structure, out), *new


def _check_means(path: str, sums: FactoredSums, rows: torch.Tensor, columns: torch.Tensor | None) -> None:
    """Check that the state of a leaf has the leaf's numbers of rows and columns."""
    for name, mean, new in (("rows", rows, sums.rows), ("columns", columns, sums.columns)):
        shape, expected = (None if x is None else [*x.shape] for x in (mean, new))
        if shape != expected:
            raise ValueError(
                f"opt.update: gradient leaf {path!r} is {[*sums.shape]}, and its state has {name} of shape {shape}: "
                f"expected {expected}; {REMEDIES['state']}"
            )


def _new_means(
    sums: FactoredSums, rows: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move the means of a leaf's rows and columns towards the means of the new squares."""
    if sums.columns is None:
        return lerp(rows, sums.rows, weight), None
    row_means, column_means = sums.rows / max(sums.shape[-1], 1), sums.columns / max(sums.shape[-2], 1)
    return lerp(rows, row_means, weight), lerp(columns, column_means, weight)


def _root_factors(rows: torch.Tensor, columns: torch.Tensor | None, min_root: Scalar) -> _Factors:
    row_sums = at_least_float32(rows)
    if columns is None:
        return _Factors(row_sums, None, min_root)
    return _Factors(row_sums / row_sums.mean(-1, keepdim=True).clamp(min=min_root), at_least_float32(columns), min_root)


def _full_direction(g: torch.Tensor, factors: _Factors) -> torch.Tensor:
    rows, columns, min_root = factors
    return _divide_by_root(g, rows if columns is None else rows[..., None] * columns[..., None, :], min_root)


def _divide_by_root(g: torch.Tensor, moment: torch.Tensor, min_root: Any) -> torch.Tensor:
    return (at_least_float32(g) * moment.clamp(min=min_root * min_root).rsqrt()).to(g.dtype)
