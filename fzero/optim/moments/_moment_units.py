"""A unit of moments in few bytes: its numbers are those of full leaves, though a border of a shard may cut a block."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero.collectives import all_gather
from fzero.optim.moments._eight_bit import DynamicCode, decode, encode
from fzero.sharding import BlockMap, Shard, check_on_device, is_box, make_box, shard_block_map, traced_spec

__all__ = ["MomentUnit", "StoredMoments", "maxima_at_borders", "moment_unit", "update_unit"]


class StoredMoments(NamedTuple):
    """The moment of a leaf or a unit: its bytes, its scales, and the tables of its code."""

    codes: Any
    scales: Any
    table: DynamicCode


class MomentUnit(NamedTuple):
    """A unit's part of an update.

    Attributes:
        position: the position of its box in the flattened tree.
        grad: the box of its gradients.
        moments: its moments.
        rest: for each other tree, its tensor or number.
        blocks: the blocks of its elements.
        scales: the scales of these blocks, `[moments, blocks]`.
    """

    position: int
    grad: Shard
    moments: list[StoredMoments]
    rest: list[Any]
    blocks: BlockMap
    scales: torch.Tensor


def moment_unit(position: int, grad: Shard, moments: list[StoredMoments], rest: Sequence[Any]) -> MomentUnit:
    check_on_device(grad, "an 8-bit moment")
    blocks = shard_block_map(grad.spec_id, moments[0].scales.spec_id, grad.device)
    scales = blocks.gather([m.scales for m in moments])
    return MomentUnit(
        position=position,
        grad=grad,
        moments=moments,
        rest=[x.data if is_box(x) else x for x in rest],
        blocks=blocks,
        scales=scales,
    )


def maxima_at_borders(f: Any, units: Sequence[MomentUnit]) -> list[torch.Tensor | None]:
    """Return for each unit the largest magnitudes in the blocks at the borders of all N shards, `[m, 2 N]`.

    It is None for a unit on one rank. One all_gather serves the units over the same axes.
    """
    out: list[torch.Tensor | None] = [None] * len(units)
    groups: dict[Any, dict[int, torch.Tensor]] = {}
    for i, unit in enumerate(units):
        spec = traced_spec(unit.grad.spec_id)
        if spec.ranks > 1:
            groups.setdefault((spec.axes, spec.varies, unit.scales.dtype), {})[i] = _own_maxima_at_borders(f, unit)
    for (axes, *_), own_maxima in groups.items():
        all_maxima = all_gather(torch.cat(list(own_maxima.values())), axes, dim=-1)  # [units m, 2 N]
        for i, x in zip(own_maxima, all_maxima.split([len(x) for x in own_maxima.values()]), strict=True):
            out[i] = x
    return out


def _own_maxima_at_borders(f: Any, unit: MomentUnit) -> torch.Tensor:
    """Return the largest magnitudes of this rank's elements in the blocks of its first and last element, `[m, 2]`."""
    block, element = unit.blocks.at_borders()  # [2], [2, 256]
    k = traced_spec(unit.grad.spec_id).shard_numel
    if not k:
        return torch.full_like(unit.scales[:, :2], -math.inf)
    element_index, block_index = element.flatten().clamp(max=k - 1), block.repeat_interleave(element.shape[1])

    def part(x: Any) -> Any:
        return x.index_select(0, element_index) if isinstance(x, torch.Tensor) and x.ndim else x

    old_moments = [
        decode(part(m.codes.data), s.index_select(0, block_index), m.table)
        for m, s in zip(unit.moments, unit.scales, strict=True)
    ]
    _, *new = f(part(unit.grad.data), *old_moments, *map(part, unit.rest))
    sizes = torch.stack([unit.blocks.magnitudes(x, block_index).view(element.shape) for x in new])
    return torch.where(element < k, sizes, -math.inf).amax(-1)


def update_unit(f: Any, unit: MomentUnit, at_borders: torch.Tensor | None) -> tuple[list[Shard], torch.Tensor]:
    """Return the update of a unit and the new bytes of each moment; and the scales of the unit's blocks."""
    spec_id, index = unit.grad.spec_id, unit.blocks.index()
    old_moments = [
        decode(m.codes.data, s.index_select(0, index), m.table) for m, s in zip(unit.moments, unit.scales, strict=True)
    ]
    u, *new_moments = f(unit.grad.data, *old_moments, *unit.rest)
    maxima = unit.blocks.maxima(new_moments, index, at_borders)
    codes = [
        encode(x, scales.index_select(0, index), m.table)
        for x, m, scales in zip(new_moments, unit.moments, maxima, strict=True)
    ]
    return [make_box(spec_id, [x]) for x in (u, *codes)], maxima
