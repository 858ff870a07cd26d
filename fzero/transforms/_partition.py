"""partition: replicated leaves → this rank's shard. The transpose pads it with zeros; neither communicates."""

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
    bound_axes,
    current_rules,
    layout_rules,
    resolve_axes,
)
from fzero.sharding import (
    Shard,
    ShardedUnit,
    Slot,
    apply_to_unit,
    assign_units,
    is_box,
    map_units,
    on_mesh,
    shard_axes,
    spec_info,
    spec_of,
    unpack,
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
    """Partition a replicated tree into this rank's shards, one per unit.

    This is the first of the four transforms. It copies only this rank's range of each unit. A box remembers the full
    leaves of its unit until its data changes, so gathering it again costs nothing.

    Args:
        params: a tree of tensors, equal on all ranks. Integer and bool leaves stay as they are, replicated;
            leaves that are one tensor object (tied) are stored once and stay tied. Boxes that are not sharded over
            any axis are sharded now: stages 0 to 2 hold the parts of split leaves in boxes like these.
        axis: the axis, or tuple of axes, to shard over; `None` for the axes of the running step.
        units: a rule `(path, leaf) -> unit name`, or `None` to leave the leaf replicated. By default each
            repeated block is a unit, and each other top-level child is one.
        over: the axes that units are sharded over, or a rule `(path, leaf) -> axes`; by default all of `axis`. Units
            are replicated along the remaining axes.
        split: a rule `(path, leaf) -> {axis: dimension}` for tensor and expert parallelism: each rank along another
            axis holds its own part of the leaf. A split leaf's unit is not sharded over that axis.
        reduce: when `value_and_grad(micro_batches=k)` reduces gradients: after "each" micro-batch, into shards (stages
            2 and 3), or "once", after the last micro-batch (stage 1).

    Returns:
        The same tree with a `Shard` in place of each unit's first leaf and a `Slot` in place of its other leaves.
        Outside any mesh, `params` itself.

    Raises:
        TypeError: if `units` or `split` is not a rule, or `over` is neither a rule nor names of axes.
        ValueError: if an axis is not bound, or `reduce` is neither "each" nor "once". Also if `params` is sharded
            already, or a leaf cannot be split in equal parts; the message names the leaf.

    Example:
        >>> import fzero, torch
        >>> params = {"w": torch.ones(2, 2), "b": torch.ones(3)}
        >>> fzero.mesh(dp=4).spmd(fzero.transforms.partition)(params)
        {'w': Shard('w', float32 [2, 2], 1 of 4 elements, dp=4), 'b': Shard('b', float32 [3], 1 of 3 elements, dp=4)}
    """
    if reduce not in ("each", "once"):
        raise ValueError(f'reduce={reduce!r}: expected "each" or "once"')
    if not bound_axes():
        return params
    axes = resolve_axes(axis)
    check_unsharded(params)
    arg_rules, step_rules = layout_rules(units, over, split), current_rules()
    rules = step_rules._replace(units=arg_rules.units or step_rules.units, over=arg_rules.over or step_rules.over)
    rules = rules._replace(split=arg_rules.split, stacks=arg_rules.stacks) if arg_rules.split else rules
    assignment = assign_units(_further(params, axes, rules, reduce), axes, rules, reduce)
    return assignment.with_shards([_own_shard(unit.spec_id, unit.leaves) for unit in assignment.units])


def _own_shard(spec_id: int, leaves: Sequence[torch.Tensor]) -> Shard:
    (data,) = apply_to_unit("partition", spec_id, leaves)
    return Shard(data, spec_id, origin=tuple(leaves))


def _further(params: Any, axes: Sequence[Axis], rules: LayoutRules, reduced: str) -> Any:
    """Shard a tree's boxed units, which no axis shards yet."""

    def sharded(unit: ShardedUnit) -> Shard:
        spec = spec_of(unit.spec_id)
        full = torch.empty(spec_info(unit.spec_id).full_shapes[0], dtype=spec.dtype, device="meta")
        over = shard_axes(spec.paths[0], full, axes, rules, spec.varies)
        if not over:
            return unit.shard
        mesh = tuple([(a.name, a.size) for a in axes if a.name in over])
        return _own_shard(on_mesh(unit.spec_id, mesh, reduced, axis_names()), unpack(spec, unit.shard.data))

    return map_units(sharded, params)


def check_unsharded(params: Any) -> None:
    """Check that no axis shards parameters yet: each is a plain tensor or a box of a split leaf's part."""
    for path, x in zip(*tree.flatten_with_paths(params, is_box)[:2], strict=True):
        if is_box(x):
            if isinstance(x, Shard | Slot) and not spec_info(x.spec_id).axes:
                continue
            raise ValueError(f"params is sharded already: leaf {path!r} is {x!r}; gather it with the step that made it")
        if isinstance(x, torch.nn.Module):
            raise TypeError("params is a module: pass fzero.nn.functional(module).params, a tree of its parameters")
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"params leaf {path!r} is {x!r}: expected a tensor; register its class as a pytree node")
