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
from fzero.sharding._boxes import Shard, box_of
from fzero.sharding._spec import intern, spec_of, traced_spec, unit_index
from fzero.sharding.elements._segments import segment_ids

__all__ = ["empty_shape", "read_subset", "subset_spec", "write_subset"]


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
    spec = spec_of(spec_id)
    rows = zip(spec.shapes, is_member, strict=True)
    shapes = tuple([shape if member else empty_shape(shape) for shape, member in rows])
    return intern(replace(spec, shapes=shapes, dtype=torch.float32, cast=None, host=Fraction(0)))


def read_subset(xs: Sequence[torch.Tensor], spec_id: int, boxes: Sequence[Shard]) -> list[torch.Tensor]:
    """Return tensors of the elements of a rank's shard, with those of the subset's leaves from other boxes.

    Args:
        xs: m tensors `[k]`, of this rank's shard of the unit.
        spec_id: the unit.
        boxes: for each tensor the shard of the subset.
    """
    subset_id = boxes[0].spec_id
    spec, subset = traced_spec(spec_id), traced_spec(subset_id)
    if not subset.numel:
        return list(xs)
    device, k = xs[0].device, spec.shard_numel
    shards = torch.stack([box.data for box in boxes])  # [m, r / N]
    full = all_gather(shards, subset.axes, dim=-1) if subset.ranks > 1 else shards
    rows = zip(subset.offsets, spec.offsets, spec.shapes, subset.shapes, strict=False)
    moves = [(at - offset, shape == own) for at, offset, shape, own in rows]
    leaf = segment_ids(spec_id, device)
    member = tensor_on([*[m for _, m in moves], False], device=device)[leaf]
    move = tensor_on([*[move for move, _ in moves], 0], device=device)[leaf]
    position = unit_index(spec_id, device) * k + torch.arange(k, device=device) + move
    position = torch.where(member, position, torch.zeros_like(position))
    return [torch.where(member, row.index_select(0, position), x) for row, x in zip(full.unbind(), xs, strict=True)]


def write_subset(xs: Sequence[torch.Tensor], spec_id: int, subset_id: int) -> list[Shard]:
    """Return the subset's shards of tensors `[k]` of this rank's shard of the unit."""
    spec, subset = traced_spec(spec_id), traced_spec(subset_id)
    if not subset.numel:
        return [box_of(subset_id, [x.new_zeros(subset.shard_numel)]) for x in xs]
    device, k = xs[0].device, spec.shard_numel
    rows = zip(spec.offsets, subset.offsets, subset.offsets[1:], strict=False)
    ranges = [torch.arange(offset, offset + stop - start, device=device) for offset, start, stop in rows]
    place = torch.cat(ranges) - unit_index(spec_id, device) * k  # [r]
    own = torch.stack(list(xs))
    if k:
        parts = own.index_select(1, place.clamp(0, k - 1))
        own = torch.where((place >= 0) & (place < k), parts, torch.zeros_like(parts))
    else:
        own = own.new_zeros(len(xs), subset.numel)
    padding = subset.shard_numel * subset.ranks - subset.numel
    own = torch.cat([own, own.new_zeros(len(xs), padding)], dim=1) if padding else own
    shards = psum_scatter(own, subset.axes, dim=-1) if subset.ranks > 1 else own
    return [box_of(subset_id, [x]) for x in shards.unbind()]
