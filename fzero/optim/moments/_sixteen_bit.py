"""Moments in bfloat16: their state, and updates that round them stochastically.

An average such as 0.999 v + 0.001 g² changes v by less than half of bfloat16's last bit. Rounding to the nearest would
lose each change; stochastic rounding keeps their sum on average (arXiv:1502.02551).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import sum_dtype
from fzero._torch import assume_constant_result
from fzero.optim.moments._rounding import round_at_random
from fzero.random import fold_in
from fzero.random import key as random_key
from fzero.sharding import (
    Shard,
    Slot,
    check_on_device,
    empty_shape,
    gather_subset,
    is_box,
    key_beside,
    leaf_bits,
    lookup_spec,
    make_box,
    put_subset,
    scatter_subset,
    shard_bits,
    subset_places,
    subset_spec,
    traced_spec,
)
from fzero.tree import Tree

__all__ = ["SixteenBit", "full_leaves", "init_sixteen_bit", "map_sixteen_bit", "wide_dtype"]

_IsFull = Callable[[str, Sequence[int], torch.dtype], bool]


class SixteenBit(NamedTuple):
    """A moment in bfloat16: trees like the parameters, and the key of the next update's draws.

    Attributes:
        values: the moment, in bfloat16.
        full: the moment in float32 of the leaves that stay in full precision, whose `values` are not read. The other
            leaves are empty, `[.., 0]`.
        key: int64, 0-d, on the device of the moment.
    """

    values: Tree
    full: Tree
    key: torch.Tensor


def init_sixteen_bit(params: Tree, is_full: _IsFull) -> SixteenBit:
    """Return a moment of zeros, of parameters on any layout; `is_full` says which leaves stay in full precision."""
    values = tree.map(lambda p: torch.zeros_like(p, dtype=torch.bfloat16), params)
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    tied: dict[int, torch.Tensor] = {}
    full: list[Any] = list(entries)
    for i, (path, x) in enumerate(zip(paths, entries, strict=True)):
        if isinstance(x, torch.Tensor):
            if id(x) not in tied:
                shape = x.shape if is_full(path, x.shape, x.dtype) else empty_shape(x.shape)
                tied[id(x)] = torch.zeros(shape, dtype=wide_dtype(x.dtype), device=x.device)
            full[i] = tied[id(x)]
        elif isinstance(x, Shard):
            check_on_device(x, "a moment in bfloat16")
            subset_id = _subset_id(x.spec_id, is_full)
            zeros = x.data.new_zeros(traced_spec(subset_id).shard_numel, dtype=wide_dtype(x.dtype))
            full[i] = make_box(subset_id, [zeros])
        elif isinstance(x, Slot):
            full[i] = Slot(_subset_id(x.spec_id, is_full), x.index)
    return SixteenBit(values, tree.unflatten(structure, full), key_beside(random_key(0), params))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the moments of a parameter are computed."""
    return sum_dtype(dtype) if dtype.is_floating_point else dtype


@assume_constant_result
def _unit_paths(spec_id: int) -> tuple[str, ...]:
    return lookup_spec(spec_id).paths


def full_leaves(spec_id: int, is_full: _IsFull) -> tuple[bool, ...]:
    """Return for each leaf of a unit whether its moments stay in full precision."""
    spec = traced_spec(spec_id)
    rows = zip(_unit_paths(spec_id), spec.item_shapes, strict=True)
    return tuple([is_full(path, shape, spec.dtype) for path, shape in rows])


def _subset_id(spec_id: int, is_full: _IsFull) -> int:
    return subset_spec(spec_id, full_leaves(spec_id, is_full))


def map_sixteen_bit(
    f: Callable[..., tuple[torch.Tensor, ...]], grads: Tree, moments: Sequence[SixteenBit], rest: Sequence[Tree]
) -> tuple[Tree, list[SixteenBit]]:
    """Update moments in bfloat16 by an elementwise function, unit by unit: see `map_moments`."""
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    parts = [part for moment in moments for part in (moment.values, moment.full)]
    columns = [tree.leaves_up_to(grads, other, is_box) for other in (*parts, *rest)]
    rows: list[list[Any]] = []  # for each entry its update, and the values and the full numbers of each moment
    leaves: dict[Any, list[Any]] = {}  # rows of full leaves, by the identities of their inputs
    for path, g, *columns_of_leaf in zip(paths, entries, *columns, strict=True):
        values, full = columns_of_leaf[: len(parts) : 2], columns_of_leaf[1 : len(parts) : 2]
        other_columns = columns_of_leaf[len(parts) :]
        if isinstance(g, Shard):
            rows.append(_update_unit(f, moments[0].key, g, values, full, rest=other_columns))
        elif isinstance(g, torch.Tensor):
            identity = tuple([tree.identity(x) for x in (g, *columns_of_leaf)])
            if identity not in leaves:
                leaves[identity] = _update_leaf(f, moments[0].key, path, g, values, full, rest=other_columns)
            rows.append(leaves[identity])
        else:  # of a slot, or None
            rows.append([None if g is None else x for x in (g, *columns_of_leaf[: len(parts)])])
    updates, *new = [tree.unflatten(structure, [row[i] for row in rows]) for i in range(1 + len(parts))]
    keys = [fold_in(moment.key, 0) for moment in moments]
    return updates, [SixteenBit(*pair) for pair in zip(new[::2], new[1::2], keys, strict=True)]


def _update_leaf(
    f: Any,
    key: torch.Tensor,
    path: str,
    g: torch.Tensor,
    values: Sequence[torch.Tensor],
    full: Sequence[torch.Tensor],
    rest: Sequence[Any],
) -> list[Any]:
    """Return the update of a full leaf, and the new values and full numbers of each moment."""
    is_full = values[0].shape == full[0].shape
    u, *new = f(g, *[v.to(x.dtype) for v, x in zip(values, full, strict=True)], *rest)
    new_moments = _round_moments(new, leaf_bits(key, path, g))
    if is_full:
        u, *full = f(g, *full, *rest)
    pairs = zip(new_moments, full, strict=True)
    return [u, *[x for pair in pairs for x in pair]]


def _update_unit(
    f: Any, key: torch.Tensor, g: Shard, values: Sequence[Shard], full: Sequence[Shard], rest: Sequence[Any]
) -> list[Any]:
    """Return the update of a unit, and the new values and full numbers of each moment."""
    check_on_device(g, "a moment in bfloat16")
    spec_id, subset_id = g.spec_id, full[0].spec_id
    moments = [v.data.to(x.dtype) for v, x in zip(values, full, strict=True)]
    inputs = [x.data if is_box(x) else x for x in rest]
    u, *new = f(g.data, *moments, *inputs)
    new_moments = _round_moments(new, shard_bits(key, spec_id, g.device))
    boxes = [make_box(subset_id, [x.data]) for x in full]
    if traced_spec(subset_id).numel:
        u, boxes = _update_full_leaves(f, g, full, inputs, u)
    pairs = zip([make_box(spec_id, [x]) for x in new_moments], boxes, strict=True)
    return [make_box(spec_id, [u]), *[x for pair in pairs for x in pair]]


def _update_full_leaves(
    f: Any, g: Shard, full: Sequence[Shard], rest: Sequence[Any], u: torch.Tensor
) -> tuple[torch.Tensor, list[Shard]]:
    """Return a unit's update `u` with that of its full leaves, which are updated alone, and their new moments.

    They have few elements. To find the old moments of each element of the unit would take longer than the update.
    """
    spec_id, subset_id = g.spec_id, full[0].spec_id
    k = traced_spec(spec_id).shard_numel
    old_leaves, places = gather_subset(full), subset_places(spec_id, subset_id, g.device)
    if not k:
        return u, scatter_subset([torch.zeros_like(x) for x in old_leaves], places, spec_id, subset_id)
    index = places.clamp(0, k - 1)

    def part(x: Any) -> Any:
        return x.index_select(0, index) if isinstance(x, torch.Tensor) and x.ndim else x

    row, *new = f(part(g.data), *old_leaves, *[part(x) for x in rest])
    return put_subset(u, row, spec_id, subset_id), scatter_subset(new, places, spec_id, subset_id)


def _round_moments(moments: Sequence[torch.Tensor], words: torch.Tensor) -> list[torch.Tensor]:
    """Return up to two moments in bfloat16. Each has 16 of the 32 bits that are drawn for an element."""
    return [round_at_random(x.to(torch.float32), words >> 16 * i) for i, x in enumerate(moments)]
