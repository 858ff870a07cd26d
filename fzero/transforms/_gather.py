"""gather: shards → full leaves. One all_gather a unit; its transpose is reduce_scatter."""

from typing import Any

import torch

from fzero._torch import is_tracing
from fzero._torch.levels import unwrapped
from fzero.axes import axis_names, joint, same
from fzero.collectives import all_gather
from fzero.sharding import (
    CutUnit,
    Shard,
    apply_over_unit_axes,
    facts,
    gather_flat,
    gather_unit,
    map_units,
    on_device,
    on_mesh,
    unit_axes,
)

__all__ = ["gather"]


def gather(params: Any) -> Any:
    """Gather every shard of a tree: plain leaves again, equal on all ranks that it was cut over.

    The second transform. One all_gather a unit, over the axes that it was cut over, and none for boxes that
    `partition` has just made. The leaves are views into one buffer a unit. Differentiable: the gradient arrives
    as shards, by one reduce_scatter a unit, as soon as the backward pass has the unit's last gradient. A leaf that
    is split along a further axis (tensor or expert parallel) comes out as this rank's part of it.

    Args:
        params: a tree in which some leaves may be boxes; others are passed through.

    Returns:
        The tree with plain tensors.

    Raises:
        ValueError: if an axis of a box is not bound or has another size than the box was cut for, or if the tree
            does not hold whole units. Outside a rank program use `step.gather` or `mesh.spmd(fzero.gather)`.

    Example:
        >>> import fzero, torch
        >>> f = lambda params: fzero.gather(fzero.partition(params))
        >>> fzero.mesh(dp=4).spmd(f)({"w": torch.arange(3)})
        {'w': tensor([0, 1, 2])}
    """
    return map_units(_leaves, params)


def _leaves(unit: CutUnit) -> tuple[torch.Tensor, ...]:
    box = on_device(unit.shard)
    return gather_unit(box.uid, box.data, box.origin)


def replicate(params: Any) -> Any:
    """Gather as `gather` does, but leave units that are split in boxes: what stages 0 to 2 hold between steps.

    Raises:
        RuntimeError: if a box was written through `.data`.
    """

    def replicated(unit: CutUnit) -> Any:
        known = facts(unit.uid)
        if not known.split:
            return gather_unit(unit.uid, unit.shard.data, _origin_of(unit.shard))
        whole = on_mesh(unit.uid, (), "each", axis_names())
        return Shard(gather_flat(unit.uid, unit.shard.data), whole)

    return map_units(replicated, params)


def _origin_of(box: Shard) -> tuple[torch.Tensor, ...] | None:
    """Return the origin of a box that a step returns, checked: what was written through `.data` is not counted.

    This costs a pass over the shard, and only a box that the step returns as it was given it has an origin.
    """
    if torch.compiler.is_dynamo_compiling():  # which cannot say whether the box was written
        return None
    axes, origin = unit_axes(box.uid), box.origin
    if origin is None or is_tracing() or any(not a.group for a in axes):  # a trace and a vmap refuse or find `.data`
        return origin
    with torch.no_grad():
        (own,) = apply_over_unit_axes("partition", joint(axes), box.uid, [unwrapped(x) for x in origin])
    if not same(own, unwrapped(box.data)):
        raise RuntimeError(
            f"{box!r} was written through .data, which torch does not count, so whole leaves that were gathered before "
            "may not be its own: write into the tensor itself under torch.no_grad(), or return new values"
        )
    return origin


def assemble(params: Any) -> Any:
    """Gather every shard of a tree, and every part of a split leaf: whole leaves, equal on all ranks."""

    def assembled(unit: CutUnit) -> list[torch.Tensor]:
        leaves = list(_leaves(unit))
        for split in reversed(facts(unit.uid).split):
            leaves = [all_gather(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
        return leaves

    return map_units(assembled, params)
