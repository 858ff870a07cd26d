"""partition: replicated leaves → own shard. Its transpose puts the own part among zeros; neither communicates."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes.scope import (
    Axis,
    AxisName,
    OverRule,
    Rules,
    SplitRule,
    UnitRule,
    axis_names,
    bound,
    resolve,
    rules_in_scope,
)
from fzero.collectives.table import Row, add_row
from fzero.layout import flat
from fzero.layout.boxes import Shard, Slot, is_box
from fzero.layout.spec import fact, on_mesh, spec_of
from fzero.layout.units import apply_to_unit, cut, groups, wanted_axes

__all__ = ["check_plain", "partition", "rule_of"]


def _split(buffer: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """View a buffer `[.., n k]` as `[n, .., k]`."""
    return buffer.unflatten(dim, (n, buffer.shape[dim] // n)).movedim(dim, 0)


def _stacked_partition(n: int, params: tuple[int, ...], xs: Any) -> list[torch.Tensor]:
    uid, lead = params
    parts = _split(flat.pack(spec_of(uid), xs, lead + 1), n, lead + 1)  # [n parts, n ranks, .., k]
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _stacked_pad(n: int, params: tuple[int, ...], xs: Any) -> list[torch.Tensor]:
    uid, lead = params
    parts = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=-2)  # [n ranks, .., n parts, k]
    return flat.unpack(spec_of(uid), parts.flatten(-2), lead + 1)


def _uniform_partition(n: int, params: tuple[int, ...], xs: Any) -> list[torch.Tensor]:
    uid, lead = params
    return [_split(flat.pack(spec_of(uid), xs, lead), n, lead)]


add_row(
    Row(
        name="partition",
        wire="",
        stacked=_stacked_partition,
        uniform=_uniform_partition,
        local=lambda meta, params, xs: [flat.own_range(spec_of(params[0]), xs, meta[3], meta[2], params[1])],
        transpose="pad",
        replicated=False,
        shift=lambda params: (params[0], params[1] + 1),
    )
)
add_row(
    Row(
        name="pad",
        wire="",
        stacked=_stacked_pad,
        local=lambda meta, params, xs: flat.pad_own(spec_of(params[0]), xs[0], meta[3], params[1]),
        transpose="partition",
        replicated=False,
        shift=lambda params: (params[0], params[1] + 1),
    )
)


def partition(
    params: Any,
    axis: AxisName = None,
    *,
    units: UnitRule | None = None,
    over: AxisName | OverRule = None,
    split: SplitRule | None = None,
    reduce: str = "each",
) -> Any:
    """Cut a replicated tree into this rank's shards, one per unit.

    The first of the four transforms. Copies only the own range of each unit. The boxes remember the leaves that
    they were cut from as long as they are unchanged, so gathering them again costs nothing.

    Args:
        params: a tree of tensors, equal on all ranks. Integer and bool leaves stay as they are, replicated;
            leaves that are one tensor object (tied) are stored once and stay tied. Boxes that no axis shards, as
            stages 0 to 2 hold the parts of split leaves, are cut further.
        axis: the axis, or tuple of axes, to shard over; `None` for the axes of the running step.
        units: a rule `(path, leaf) -> unit name`, or `None` to leave the leaf replicated. By default each
            repeated block is a unit, and each other top-level child is one.
        over: those of the axes that units are sharded over, or a rule `(path, leaf) -> axes`; by default all. Along
            the others they are replicated.
        split: a rule `(path, leaf) -> {axis: dimension}` for leaves of which each rank along a further axis has its
            own part: tensor and expert parallelism. Such a leaf's unit is not sharded over that axis.
        reduce: when `value_and_grad(micro_batches=k)` reduces gradients: "each" micro-batch into shards (stages 2
            and 3), or "once", after the last (stage 1).

    Returns:
        The same tree with a `Shard` in place of the first leaf of each unit and a `Slot` in place of the others.
        Outside any mesh, `params` itself.

    Raises:
        ValueError: if an axis is not bound, if `reduce` is neither, if `params` holds shards already, or if a leaf
            cannot be split in equal parts. Names the path.

    Example:
        >>> import fzero, torch
        >>> params = {"w": torch.ones(2, 2), "b": torch.ones(3)}
        >>> fzero.mesh(dp=4).spmd(fzero.transforms.partition)(params)
        {'w': Shard('w', 1 of 4 elements, dp=4), 'b': Shard('b', 1 of 3 elements, dp=4)}
    """
    if reduce not in ("each", "once"):
        raise ValueError(f'reduce={reduce!r}: expected "each" or "once"')
    if not bound():
        return params
    axes, given = resolve(axis), rules_in_scope()
    check_plain(params)
    rules = Rules(units or given.units, rule_of(over) or given.over, split or given.split, given.dtype)
    plan = cut(_further(params, axes, rules, reduce), axes, rules, reduce)
    shards = []
    for unit in plan.units:
        (data,) = apply_to_unit("partition", unit.uid, unit.leaves)
        shards.append(Shard(data, unit.uid, origin=tuple(unit.leaves)))
    return plan.with_shards(shards)


def rule_of(over: AxisName | OverRule) -> OverRule | None:
    """Make a rule of axes that are the same for all leaves."""
    return over if callable(over) or over is None else lambda path, leaf: over


def _further(params: Any, axes: Sequence[Axis], rules: Rules, reduce: str) -> Any:
    """Shard the units of a tree that are in boxes, and sharded over no axis yet."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    for uid, box, members in groups(paths, entries):
        spec = spec_of(uid)
        leaves = flat.unpack(spec, box.data)
        whole = torch.empty(fact(uid, "whole_shapes")[0], dtype=spec.dtype, device="meta")
        over = wanted_axes(spec.paths[0], whole, axes, rules, spec.varies)
        if not over:
            continue
        cut_uid = on_mesh(uid, tuple([(a.name, a.size) for a in axes if a.name in over]), reduce, axis_names())
        for position, index in members:
            entries[position] = Slot(cut_uid, index)
        (data,) = apply_to_unit("partition", cut_uid, leaves)
        entries[members[0][0]] = Shard(data, cut_uid, origin=tuple(leaves))
    return tree.unflatten(structure, entries)


def check_plain(params: Any) -> None:
    """Check that parameters that are to be cut are not; parts of split leaves may be."""
    for path, x in zip(*tree.flatten_with_paths(params, is_box)[:2], strict=True):
        if is_box(x):
            if isinstance(x, Shard | Slot) and not fact(x.uid, "axes"):
                continue
            raise ValueError(f"params is cut already: leaf {path!r} is {x!r}; gather it with the step that cut it")
        if isinstance(x, torch.nn.Module):
            raise TypeError("params is a module: pass fzero.nn.functional(module).params, a tree of its parameters")
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"params leaf {path!r} is {x!r}: expected a tensor; register its class as a pytree node")
