"""partition: replicated leaves → own shard. Its transpose puts the own part among zeros; neither communicates."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes import (
    Axis,
    AxisName,
    LayoutRules,
    OverRule,
    SplitRules,
    UnitRule,
    axis_names,
    bound,
    given_rules,
    resolve,
    rules_here,
)
from fzero.sharding import (
    CutUnit,
    Shard,
    Slot,
    apply_to_unit,
    assign,
    facts,
    is_box,
    map_units,
    on_mesh,
    spec_of,
    unpack,
    wanted_axes,
)

__all__ = ["check_unsharded", "partition"]


def partition(
    params: Any,
    axis: AxisName = None,
    *,
    units: UnitRule | None = None,
    over: AxisName | OverRule = None,
    split: SplitRules | None = None,
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
        TypeError: if `units` or `split` is no rule, or `over` neither one nor names of axes.
        ValueError: if an axis is not bound, if `reduce` is neither, if `params` holds shards already, or if a leaf
            cannot be split in equal parts. Names the path.

    Example:
        >>> import fzero, torch
        >>> params = {"w": torch.ones(2, 2), "b": torch.ones(3)}
        >>> fzero.mesh(dp=4).spmd(fzero.transforms.partition)(params)
        {'w': Shard('w', float32 [2, 2], 1 of 4 elements, dp=4), 'b': Shard('b', float32 [3], 1 of 3 elements, dp=4)}
    """
    if reduce not in ("each", "once"):
        raise ValueError(f'reduce={reduce!r}: expected "each" or "once"')
    if not bound():
        return params
    axes = resolve(axis)
    check_unsharded(params)
    given, around = given_rules(units, over, split), rules_here()
    rules = around._replace(units=given.units or around.units, over=given.over or around.over)
    rules = rules._replace(split=given.split, stacks=given.stacks) if given.split else rules
    assignment = assign(_further(params, axes, rules, reduce), axes, rules, reduce)
    return assignment.with_shards([_own_shard(unit.uid, unit.leaves) for unit in assignment.units])


def _own_shard(uid: int, leaves: Sequence[torch.Tensor]) -> Shard:
    (data,) = apply_to_unit("partition", uid, leaves)
    return Shard(data, uid, origin=tuple(leaves))


def _further(params: Any, axes: Sequence[Axis], rules: LayoutRules, reduced: str) -> Any:
    """Shard the units of a tree that are in boxes, and sharded over no axis yet."""

    def sharded(unit: CutUnit) -> Shard:
        spec = spec_of(unit.uid)
        whole = torch.empty(facts(unit.uid).whole_shapes[0], dtype=spec.dtype, device="meta")
        over = wanted_axes(spec.paths[0], whole, axes, rules, spec.varies)
        if not over:
            return unit.shard
        mesh = tuple([(a.name, a.size) for a in axes if a.name in over])
        return _own_shard(on_mesh(unit.uid, mesh, reduced, axis_names()), unpack(spec, unit.shard.data))

    return map_units(sharded, params)


def check_unsharded(params: Any) -> None:
    """Check that parameters are sharded over no axis yet: plain tensors, or boxes of the parts of split leaves."""
    for path, x in zip(*tree.flatten_with_paths(params, is_box)[:2], strict=True):
        if is_box(x):
            if isinstance(x, Shard | Slot) and not facts(x.uid).axes:
                continue
            raise ValueError(f"params is cut already: leaf {path!r} is {x!r}; gather it with the step that cut it")
        if isinstance(x, torch.nn.Module):
            raise TypeError("params is a module: pass fzero.nn.functional(module).params, a tree of its parameters")
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"params leaf {path!r} is {x!r}: expected a tensor; register its class as a pytree node")
