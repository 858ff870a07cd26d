"""Some leaves of a unit as a unit of their own, with numbers of another dtype for each of their elements.

The other leaves are empty there. A rank's shard of the subset does not begin where its shard of the unit does, so an
all_gather reads the numbers, and a reduce_scatter writes them.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from fzero._torch import assume_constant_result, tensor_on
from fzero.collectives import all_gather, psum_scatter
from fzero.sharding._boxes import Shard, make_box
from fzero.sharding._spec import intern, lookup_spec, traced_spec, unit_index
from fzero.sharding.elements._by_leaf import materialize, spread_leaf_values, unit_positions

__all__ = [
    "empty_shape",
    "gather_subset",
    "put_subset",
    "scatter_subset",
    "subset_places",
    "subset_spec",
]


def empty_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a leaf that is not in the subset: without elements, of as many dimensions.

    Example:
        >>> empty_shape((3, 512))
        (3, 0)
    """
    return (*shape[:-1], 0)


@assume_constant_result
def subset_spec(spec_id: int, is_member: tuple[bool, ...]) -> int:
    """Return the spec_id of the unit of a subset: of a unit's leaves those that are members, in float32."""
    spec = lookup_spec(spec_id)
    rows = zip(spec.shapes, is_member, strict=True)
    shapes = tuple([shape if member else empty_shape(shape) for shape, member in rows])
    return intern(replace(spec, shapes=shapes, dtype=torch.float32, cast=None, host=Fraction(0)))


def gather_subset(boxes: Sequence[Shard]) -> list[torch.Tensor]:
    """Return the r numbers of a subset, for each of its shards `boxes`: `[r]`."""
    subset = traced_spec(boxes[0].spec_id)
    shards = torch.stack([box.data for box in boxes])  # [m, r / N]
    full = all_gather(shards, subset.axes, dim=-1) if subset.ranks > 1 else shards
    return list(full[:, : subset.numel].unbind())


def subset_places(spec_id: int, subset_id: int, device: torch.device) -> torch.Tensor:
    """Return the index in this rank's shard `[k]` of each of the subset's elements: int64 `[r]`.

    Those of other ranks' elements are negative, or k and above.
    """
    spec, subset = traced_spec(spec_id), traced_spec(subset_id)
    rows = zip(spec.offsets, subset.offsets, subset.offsets[1:], strict=False)
    ranges = [torch.arange(offset, offset + stop - start, device=device) for offset, start, stop in rows]
    return torch.cat(ranges) - unit_index(spec_id, device) * spec.shard_numel


def put_subset(x: torch.Tensor, row: torch.Tensor, spec_id: int, subset_id: int) -> torch.Tensor:
    """Return a tensor `[k]` of this rank's shard of a unit, with the numbers `[r]` of the subset in their places."""
    spec, subset = traced_spec(spec_id), traced_spec(subset_id)
    nowhere = -spec.shard_numel * spec.ranks  # a distance at which the index of each element is negative
    rows = zip(subset.offsets, spec.offsets, spec.shapes, subset.shapes, strict=False)
    moves = [at - offset if shape == own else nowhere for at, offset, shape, own in rows]
    position = unit_positions(spec_id, x.device)
    (distance,) = spread_leaf_values(
        spec_id, position, [tensor_on([*moves, nowhere], dtype=position.dtype, device=x.device)]
    )
    index = position + distance
    # A segment first runs on zeros, also for the distances. An index out of bounds would then end the process: no
    # exception leaves a thread of a compiled loop.
    inside = index.clamp(0, len(row) - 1)
    return torch.where(index >= 0, materialize(row).index_select(0, inside), x)


def scatter_subset(xs: Sequence[torch.Tensor], places: torch.Tensor, spec_id: int, subset_id: int) -> list[Shard]:
    """Return the subset's shards of tensors `[r]`, of which each rank has the numbers of its own shard's elements.

    Args:
        xs: the tensors; what they hold of other ranks' elements does not count.
        places: the result of `subset_places`.
        spec_id: the unit.
        subset_id: the subset.
    """
    k, subset = traced_spec(spec_id).shard_numel, traced_spec(subset_id)
    rows = torch.stack(list(xs))
    rows = torch.where((places >= 0) & (places < k), rows, torch.zeros_like(rows))
    padding = subset.shard_numel * subset.ranks - subset.numel
    rows = torch.cat([rows, rows.new_zeros(len(xs), padding)], dim=1) if padding else rows
    shards = psum_scatter(rows, subset.axes, dim=-1) if subset.ranks > 1 else rows
    return [make_box(subset_id, [x]) for x in shards.unbind()]
