"""The four transforms from which every stage can be written: partition, gather, reduce_scatter and step.

`partition` makes this rank's shards of replicated leaves; its transpose pads them with zeros. `gather` makes full
leaves from shards, with one all_gather per unit; its transpose is `reduce_scatter`. `step` updates trees of any layout.
`replicate` and `assemble` are gathers too, which differ in split leaves: they keep the parts in boxes, or join them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._torch import is_tracing
from fzero._torch.levels import unwrap
from fzero._tracebacks import api_boundary
from fzero.axes import (
    Axis,
    AxisName,
    LayoutRules,
    OverRule,
    SplitRules,
    UnitRule,
    are_equal,
    axis_names,
    bound_axes,
    current_rules,
    join_axes,
    layout_rules,
    resolve_shard_axes,
)
from fzero.collectives import psum
from fzero.optim import OptimizerLike, OptState, Params, Updates, apply_updates, check_has_method
from fzero.sharding import (
    ReduceGrads,
    Shard,
    ShardedUnit,
    Slot,
    apply_over_unit_axes,
    apply_to_unit,
    assign_units,
    gather_flat,
    gather_full_leaves,
    gather_unit,
    is_box,
    lookup_spec,
    map_units,
    shard_axes,
    shard_to_device,
    traced_spec,
    unit_axes,
    view_leaves,
    with_sharding_axes,
)
from fzero.tree import Tree

__all__ = ["assemble", "gather", "partition", "reduce_scatter", "replicate", "step"]


@api_boundary
def partition(
    params: Params,
    axis: AxisName = None,
    *,
    units: UnitRule | None = None,
    over: AxisName | OverRule = None,
    split: SplitRules | None = None,
    reduce_grads: ReduceGrads = "each",
) -> Params:
    """Partition a replicated tree into this rank's shards, one per unit.

    The partition copies only this rank's range of each unit. A box remembers the full leaves of its unit until its
    data changes, so gathering it again costs nothing.

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
        reduce_grads: when `value_and_grad(micro_batches=k)` reduces gradients: after "each" micro-batch, into shards
            (stages 2 and 3), or "once", after the last micro-batch (stage 1).

    Returns:
        The same tree with a `Shard` in place of each unit's first leaf and a `Slot` in place of its other leaves.
        Outside any mesh, `params` itself.

    Raises:
        TypeError: if `params` is no tree, `units` or `split` is not a rule, or `over` is neither a rule nor names of
            axes.
        ValueError: if an axis is not bound, or `reduce_grads` is neither "each" nor "once". Also if `params` is sharded
            already, or a leaf cannot be split in equal parts; the message names the leaf.

    Example:
        >>> import fzero, torch
        >>> params = {"w": torch.ones(2, 2), "b": torch.ones(3)}
        >>> fzero.mesh(dp=4).spmd(fzero.transforms.partition)(params)
        {'w': Shard('w', float32 [2, 2], 1 of 4 elements, dp=4), 'b': Shard('b', float32 [3], 1 of 3 elements, dp=4)}
    """
    check_choice("reduce_grads", reduce_grads, ("each", "once"))
    tree.check_is_tree("params", params, "fzero.partition(params)")
    if not bound_axes():
        return params
    axes = resolve_shard_axes(axis)
    _check_unsharded(params)
    arg_rules, step_rules = layout_rules(units, over, split), current_rules()
    rules = step_rules._replace(units=arg_rules.units or step_rules.units, over=arg_rules.over or step_rules.over)
    rules = rules._replace(split=arg_rules.split, stacks=arg_rules.stacks) if arg_rules.split else rules
    assignment = assign_units(_shard_further(params, axes, rules, reduce_grads), axes, rules, reduce_grads)
    return assignment.with_shards([_own_shard(unit.spec_id, unit.leaves) for unit in assignment.units])


def _own_shard(spec_id: int, leaves: Sequence[torch.Tensor]) -> Shard:
    (data,) = apply_to_unit("partition", spec_id, leaves)
    return Shard(data, spec_id, origin=tuple(leaves))


def _shard_further(params: Params, axes: Sequence[Axis], rules: LayoutRules, reduce_grads: ReduceGrads) -> Params:
    """Shard a tree's boxed units, which no axis shards yet."""

    def shard_unit(unit: ShardedUnit) -> Shard:
        spec = lookup_spec(unit.spec_id)
        full = torch.empty(traced_spec(unit.spec_id).full_shapes[0], dtype=spec.dtype, device="meta")
        over = shard_axes(spec.paths[0], full, axes, rules, spec.varies)
        if not over:
            return unit.shard
        sizes = tuple([(a.name, a.size) for a in axes if a.name in over])
        return _own_shard(
            with_sharding_axes(unit.spec_id, sizes, reduce_grads, axis_names()), view_leaves(spec, unit.shard.data)
        )

    return map_units(shard_unit, params)


def _check_unsharded(params: Params) -> None:
    """Check that no axis shards parameters yet: each is a plain tensor or a box of a split leaf's part."""
    for path, x in zip(*tree.flatten_with_paths(params, is_box)[:2], strict=True):
        if is_box(x):
            if isinstance(x, Shard | Slot) and not traced_spec(x.spec_id).axes:
                continue
            raise ValueError(f"params is sharded already: leaf {path!r} is {x!r}; gather it with the step that made it")
        if isinstance(x, torch.nn.Module):
            raise TypeError("params is a module: pass fzero.nn.functional(module).params, a tree of its parameters")
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(tree.not_a_tensor("params", path, x))


@api_boundary
def gather(params: Params) -> Params:
    """Gather every shard of a tree into plain leaves, in a rank program; split leaves stay split.

    The leaves are equal on all ranks that the tree was sharded over. The gather runs one all_gather per unit, over the
    axes that the unit is sharded over, and none for boxes that `partition` has just made. The leaves of a unit are
    views into one buffer. The gather is differentiable: one reduce_scatter per unit returns the gradient as shards, as
    soon as the backward pass has the unit's last gradient. For a leaf that is split along another axis (tensor or
    expert parallelism) the gather returns this rank's part; `step.gather` joins the parts.

    Args:
        params: a tree whose leaves may be boxes; other leaves are passed through.

    Returns:
        The tree with plain tensors.

    Raises:
        ValueError: if an axis of a box is not bound, or has another size than the box was sharded for. Also if the tree
            holds only part of a unit. Outside a rank program use `step.gather` or `mesh.spmd(fzero.gather)`.
        TypeError: if `params` is one value that is no tensor, such as an optimizer.

    Example:
        >>> import fzero, torch
        >>> f = lambda params: fzero.gather(fzero.partition(params))
        >>> fzero.mesh(dp=4).spmd(f)({"w": torch.arange(3)})
        {'w': tensor([0, 1, 2])}
    """
    tree.check_is_tree("params", params, "fzero.gather(params)")
    return map_units(_unit_leaves, params)


def _unit_leaves(unit: ShardedUnit) -> tuple[torch.Tensor, ...]:
    box = shard_to_device(unit.shard)
    return gather_unit(box.spec_id, box.data, box.origin)


def replicate(params: Params) -> Params:
    """Gather as `gather` does, but leave split units in boxes: the layout of stages 0 to 2 between steps.

    Raises:
        RuntimeError: if a box was written through `.data`.
    """

    def replicate_unit(unit: ShardedUnit) -> Any:
        if not traced_spec(unit.spec_id).split:
            return gather_unit(unit.spec_id, unit.shard.data, _box_origin(unit.shard))
        spec_id = with_sharding_axes(unit.spec_id, (), "each", axis_names())
        return Shard(gather_flat(unit.spec_id, unit.shard.data), spec_id)

    return map_units(replicate_unit, params)


def _box_origin(box: Shard) -> tuple[torch.Tensor, ...] | None:
    """Return the origin of a box that a step returns, after a check that the box still holds its values.

    Tensor versions do not count writes through `.data`, so the check compares values: one pass over the shard. Only
    boxes that the step returns unchanged have an origin.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot tell whether the box was written
        return None
    axes, origin = unit_axes(box.spec_id), box.origin
    # traces and vmaps detect or refuse writes through `.data` themselves
    if origin is None or is_tracing() or any(not a.group for a in axes):
        return origin
    with torch.no_grad():
        (shard,) = apply_over_unit_axes("partition", join_axes(axes), box.spec_id, [unwrap(x) for x in origin])
    if not are_equal(shard, unwrap(box.data)):
        raise RuntimeError(
            f"{box!r} was written through .data, which torch does not count as a write, so the leaves gathered before "
            "may be stale: write into the tensor itself under torch.no_grad(), or return new values"
        )
    return origin


def assemble(params: Params) -> Params:
    """Gather every shard of a tree and all parts of split leaves into full leaves, equal on all ranks."""
    return map_units(lambda unit: gather_full_leaves(shard_to_device(unit.shard)), params)


@api_boundary
def reduce_scatter(grads: Tree, like: Tree) -> Tree:
    """Sum full gradients over the ranks, and return this rank's shard of each unit.

    This is the transpose of `gather`.

    Args:
        grads: a tree of tensors that differ by rank, with the structure of the gathered `like`.
        like: a tree of boxes, as `partition` returns it. The result has the same layout.

    Returns:
        A tree like `like` that holds sums (divide by `axis_size()` for means). Leaves that are replicated in `like` are
        summed by an all_reduce each.

    Raises:
        ValueError: if the trees differ in structure, or a gradient differs from its leaf in shape. The message names
            the leaf.

    Example:
        >>> import fzero, torch
        >>> f = lambda p: fzero.reduce_scatter(p, like=fzero.partition(p))
        >>> fzero.mesh(dp=2).spmd(f)({"w": torch.ones(4)})["w"].data
        tensor([[2., 2.],
                [2., 2.]])
    """
    paths, entries, structure = tree.flatten_with_paths(like, is_box)
    full = tree.leaves_up_to(like, grads, is_box)
    for i, g in enumerate(full):
        if not is_box(entries[i]) and g is not None:
            entries[i] = psum(g)

    def sum_unit(unit: ShardedUnit) -> Shard:
        (data,) = apply_to_unit("reduce_scatter", unit.spec_id, _sum_ties(unit, full, paths))
        return Shard(data, unit.spec_id)

    return map_units(sum_unit, tree.unflatten(structure, entries))


def _sum_ties(unit: ShardedUnit, full: list[Any], paths: list[str]) -> list[torch.Tensor]:
    """Return a unit's full gradients in the unit's order; gradients of one tied leaf are summed."""
    leaves: dict[int, torch.Tensor] = {}
    for leaf_index, index in unit.members:
        g = full[leaf_index]
        expected = list(lookup_spec(unit.spec_id).shapes[index])
        if not isinstance(g, torch.Tensor) or list(g.shape) != expected:
            text = list(g.shape) if isinstance(g, torch.Tensor) else repr(g)
            raise ValueError(f"grads leaf {paths[leaf_index]!r} is {text}: expected shape {expected}, as in like")
        leaves[index] = g if index not in leaves or g is leaves[index] else leaves[index] + g
    return [leaves[i] for i in range(len(leaves))]


@api_boundary
def step(opt: OptimizerLike) -> Callable[[Params, Updates, OptState], tuple[Params, OptState]]:
    """Make the function that updates parameters.

    On shards each rank updates 1/N of the parameters, with 1/N of the optimizer's state.

    Args:
        opt: an (init, update) pair.

    Returns:
        `(params, grads, opt_state) -> (params, opt_state)`.

    Raises:
        TypeError: if `opt` has no `update`, for example an optimizer of torch.optim.
        ValueError: when called, if the trees differ in structure or layout. The message names the leaf.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> params, opt = {"w": torch.tensor(1.0)}, optim.sgd(0.1)
        >>> step(opt)(params, {"w": torch.tensor(2.0)}, opt.init(params))[0]
        {'w': tensor(0.8000)}
    """
    check_has_method(opt, "update")

    def update(params: Params, grads: Updates, opt_state: OptState) -> tuple[Params, OptState]:
        updates, opt_state = opt.update(grads, opt_state, params=params)
        return apply_updates(params, updates), opt_state

    return update
