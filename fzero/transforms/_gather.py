"""gather: shards → full leaves. One all_gather per unit; its transpose is reduce_scatter."""

from typing import Any

import torch

from fzero._torch import is_tracing
from fzero._torch.levels import unwrap
from fzero.axes import are_equal, axis_names, join_axes
from fzero.collectives import all_gather
from fzero.sharding import (
    Shard,
    ShardedUnit,
    apply_over_unit_axes,
    gather_flat,
    gather_unit,
    map_units,
    on_mesh,
    shard_to_device,
    spec_info,
    unit_axes,
)

__all__ = ["gather"]


def gather(params: Any) -> Any:
    """Gather every shard of a tree into plain leaves, equal on all ranks that the tree was sharded over.

    This is the second transform. It runs one all_gather per unit, over the axes that the unit is sharded over, and none
    for boxes that `partition` has just made. The leaves of a unit are views into one buffer. The gather is
    differentiable: one reduce_scatter per unit returns the gradient as shards, as soon as the backward pass has the
    unit's last gradient. For a leaf that is split along another axis (tensor or expert parallelism) the gather returns
    this rank's part.

    Args:
        params: a tree whose leaves may be boxes; other leaves are passed through.

    Returns:
        The tree with plain tensors.

    Raises:
        ValueError: if an axis of a box is not bound, or has another size than the box was sharded for. Also if the tree
            holds only part of a unit. Outside a rank program use `step.gather` or `mesh.spmd(fzero.gather)`.

    Example:
        >>> import fzero, torch
        >>> f = lambda params: fzero.gather(fzero.partition(params))
        >>> fzero.mesh(dp=4).spmd(f)({"w": torch.arange(3)})
        {'w': tensor([0, 1, 2])}
    """
    return map_units(_leaves, params)


def _leaves(unit: ShardedUnit) -> tuple[torch.Tensor, ...]:
    box = shard_to_device(unit.shard)
    return gather_unit(box.spec_id, box.data, box.origin)


def replicate(params: Any) -> Any:
    """Gather as `gather` does, but leave split units in boxes: the layout of stages 0 to 2 between steps.

    Raises:
        RuntimeError: if a box was written through `.data`.
    """

    def replicated(unit: ShardedUnit) -> Any:
        unit_facts = spec_info(unit.spec_id)
        if not unit_facts.split:
            return gather_unit(unit.spec_id, unit.shard.data, _origin_of(unit.shard))
        spec_id = on_mesh(unit.spec_id, (), "each", axis_names())
        return Shard(gather_flat(unit.spec_id, unit.shard.data), spec_id)

    return map_units(replicated, params)


def _origin_of(box: Shard) -> tuple[torch.Tensor, ...] | None:
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


def assemble(params: Any) -> Any:
    """Gather every shard of a tree and all parts of split leaves into full leaves, equal on all ranks."""

    def assembled(unit: ShardedUnit) -> list[torch.Tensor]:
        leaves = list(_leaves(unit))
        for split in reversed(spec_info(unit.spec_id).split):
            leaves = [all_gather(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
        return leaves

    return map_units(assembled, params)
