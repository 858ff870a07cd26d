"""Blocks of 256 elements within leaves: the block of each element of a shard, and one number for each block.

A block never crosses the border of a leaf, so it depends neither on how leaves form units nor on the number of ranks.
The border of a shard may cut a block in two. Then the ranks that hold its parts exchange its maximum, by an all_gather
of two numbers a rank.

The blocks' numbers are a unit of their own, sharded over the same axes, so they are saved and loaded like any other
leaf. A rank's shard of numbers does not begin at the block at which its shard of elements begins. So an all_gather
reads the numbers, and a reduce_scatter writes them: 8 bytes for 256 elements, beside 2048 for gradients and parameters.
Shards that end with blocks would need no communication, but would change the layout of all trees and checkpoints.

A leaf may instead have a number for each element: then its numbers have the shape of the leaf. For a leaf with blocks
of 256 the numbers have the leaf's shape with a last dimension of 1/256, or one dimension if 256 does not divide it.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from fzero._torch import assume_constant_result, tensor_on
from fzero.collectives import all_gather, psum_scatter
from fzero.sharding._boxes import Shard, make_box
from fzero.sharding._spec import Spec, intern, lookup_spec, traced_spec, unit_index

__all__ = ["BlockMap", "block_shape", "block_spec", "leaf_blocks", "shard_block_map"]

_BLOCK_ELEMENTS = 256


def block_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the numbers of a leaf's blocks.

    Example:
        >>> block_shape((3, 512)), block_shape((3, 100)), block_shape(())
        ((3, 2), (2,), (1,))
    """
    if shape and shape[-1] % _BLOCK_ELEMENTS == 0:
        return (*shape[:-1], shape[-1] // _BLOCK_ELEMENTS)
    return (-(-math.prod(shape) // _BLOCK_ELEMENTS),)


def leaf_blocks(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """View or copy a full leaf as its blocks `[blocks, 256]`, the last one filled with zeros, for its numbers.

    If the leaf has a number for each element, a block is one element: `[n, 1]`.
    """
    if x.shape == numbers.shape:
        return x.reshape(-1, 1)
    padding = numbers.numel() * _BLOCK_ELEMENTS - x.numel()
    flat = x.reshape(-1)
    return (torch.cat([flat, flat.new_zeros(padding)]) if padding else flat).view(-1, _BLOCK_ELEMENTS)


@assume_constant_result
def block_spec(spec_id: int, by_element: tuple[bool, ...]) -> int:
    """Return the spec_id of the unit of the blocks' numbers.

    Args:
        spec_id: the unit of the elements.
        by_element: for each leaf, whether it has a number for each element.

    Raises:
        ValueError: if an axis splits a leaf in parts that cut its blocks. The message names the leaf.
    """
    spec = lookup_spec(spec_id)
    shapes = [
        shape if single else _part_shape(spec, index)
        for index, (shape, single) in enumerate(zip(spec.shapes, by_element, strict=True))
    ]
    return intern(replace(spec, shapes=tuple(shapes), dtype=torch.float32, cast=None, host=Fraction(0)))


def _part_shape(spec: Spec, index: int) -> tuple[int, ...]:
    """Return the shape of the numbers of this rank's part of a leaf."""
    part, item = spec.shapes[index], spec.item_shapes[index]
    lead = len(part) - len(item)  # 1 for the dimension of the ranks of a stacked list
    shape = list(block_shape(item))
    has_rows = len(shape) == len(item) and item[-1] % _BLOCK_ELEMENTS == 0
    for s in spec.split:
        dim = s.dims[index] - lead
        if s.stacked:
            continue
        if shape[dim] % s.size if has_rows else dim or math.prod(part) % _BLOCK_ELEMENTS:
            raise ValueError(
                f"leaf {spec.paths[index]!r} is {list(spec.full_shapes[index])}, and {s.axis}={s.size} splits its "
                f"dimension {s.dims[index]} in parts that cut blocks of {_BLOCK_ELEMENTS} elements, so its numbers "
                "would depend on the number of ranks: leave the leaf in full precision, by "
                'moments=optim.Moments("int8", full=...)'
            )
        shape[dim] //= s.size
    return (*part[:lead], *shape)


class BlockMap(NamedTuple):
    """The blocks of which a rank's shard of k elements has a part: at most t - 1, and the padding.

    Attributes:
        spec_id: the unit of the elements.
        scales_id: the unit of the blocks' numbers.
        blocks: the indices of the blocks among the unit's b blocks, int64 `[t]`; from b on they stand for padding.
        starts: the index of each block's first element in the shard, int64 `[t]`; k for a block of a later rank.
        single: whether each block is one element, bool `[t]`; None if all are alike.
        last: the index in `blocks` of the block of the last element, int64 `[1]`.
    """

    spec_id: int
    scales_id: int
    blocks: torch.Tensor
    starts: torch.Tensor
    single: torch.Tensor | None
    last: torch.Tensor

    def index(self) -> torch.Tensor:
        """Return which of the t blocks each element lies in, int64 `[k]`: the last that begins before it."""
        k = traced_spec(self.spec_id).shard_numel
        begins = torch.zeros(k + 1, dtype=torch.int64, device=self.starts.device)
        return begins.scatter_add(0, self.starts, torch.ones_like(self.starts)).cumsum(0)[:k] - 1

    def gather(self, boxes: Sequence[Shard]) -> torch.Tensor:
        """Return the blocks' numbers `[m, t]` from m shards of numbers; 0 for padding."""
        spec = traced_spec(self.scales_id)
        shards = torch.stack([box.data for box in boxes])  # [m, b / N]
        full = all_gather(shards, spec.axes, dim=-1) if spec.ranks > 1 else shards
        full = torch.cat([full[:, : spec.numel], full.new_zeros(len(boxes), 1)], dim=1)
        return full.index_select(1, self.blocks.clamp(max=spec.numel))

    def at_borders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks of the first and of the last element, and the elements of both in the shard.

        Returns:
            Indices into `blocks`, int64 `[2]`; and indices of elements, int64 `[2, 256]`: some twice, or k for none.
        """
        k = traced_spec(self.spec_id).shard_numel
        block = torch.cat([torch.zeros_like(self.last), self.last])
        ends = torch.cat([self.starts, torch.full_like(self.last, k)]).index_select(0, block + 1)
        element = self.starts.index_select(0, block)[:, None] + torch.arange(_BLOCK_ELEMENTS, device=block.device)
        return block, torch.where(element < ends[:, None], element, k)

    def magnitudes(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the absolute values of elements, but those that are blocks of their own unchanged."""
        if self.single is not None:
            return torch.where(self.single.index_select(0, index), x, x.abs())
        return x if traced_spec(self.scales_id).shapes == traced_spec(self.spec_id).shapes else x.abs()

    def maxima(self, xs: Sequence[torch.Tensor], index: torch.Tensor, at_borders: torch.Tensor | None) -> torch.Tensor:
        """Return the largest magnitudes in the blocks, `[m, t]`, the other ranks' parts of the blocks included.

        Args:
            xs: m tensors of the shard's elements.
            index: the result of `index`.
            at_borders: the largest magnitudes in the blocks at the borders of all N shards, `[m, 2 N]`; None if N is 1.
        """
        lowest = xs[0].new_full(self.blocks.shape, -math.inf)
        own_maxima = torch.stack([lowest.scatter_reduce(0, index, self.magnitudes(x, index), "amax") for x in xs])
        if at_borders is None:
            return own_maxima
        borders = tensor_on(
            _border_blocks(self.spec_id, self.scales_id), device=own_maxima.device
        ).flatten()  # [2 N], blocks
        for block in self.blocks.index_select(0, self.at_borders()[0]).unbind():
            largest = at_borders.masked_fill(borders != block, -math.inf).amax(1, keepdim=True)
            own_maxima = torch.where(self.blocks == block, largest, own_maxima)
        return own_maxima

    def scatter(self, numbers: torch.Tensor) -> list[Shard]:
        """Return m shards of numbers from the numbers `[m, t]` of this rank's blocks.

        Of the ranks that hold parts of a block, the last one sends its number.
        """
        spec = traced_spec(self.scales_id)
        own_numbers = numbers
        if spec.ranks > 1:
            ranges = tensor_on(_owned_blocks(self.spec_id, self.scales_id), device=own_numbers.device)  # [N, 2]
            first, stop = ranges.index_select(0, unit_index(self.spec_id, own_numbers.device).reshape(1))[0]
            own_numbers = torch.where(
                (self.blocks >= first) & (self.blocks < stop), own_numbers, torch.zeros_like(own_numbers)
            )
        length = spec.shard_numel * spec.ranks
        full = own_numbers.new_zeros(len(own_numbers), length + own_numbers.shape[1]).index_add(
            1, self.blocks, own_numbers
        )[:, :length]
        shards = psum_scatter(full, spec.axes, dim=-1) if spec.ranks > 1 else full
        return [make_box(self.scales_id, [x]) for x in shards.unbind()]


def shard_block_map(spec_id: int, scales_id: int, device: torch.device) -> BlockMap:
    """Return the blocks of this rank's shard of a unit.

    Args:
        spec_id: the unit of the elements.
        scales_id: the unit of the blocks' numbers, by `block_spec`.
        device: the device of the elements.
    """
    k, rank = traced_spec(spec_id).shard_numel, unit_index(spec_id, device).reshape(1)
    borders = _border_blocks(spec_id, scales_id)
    t = max([last - first for first, last in borders]) + 2
    first_and_last = tensor_on(borders, device=device).index_select(0, rank)  # [1, 2]
    blocks = first_and_last[:, 0] + torch.arange(t, device=device)
    rows = _leaf_rows(spec_id, scales_id)
    leaf = torch.bucketize(blocks, tensor_on([first for _, _, first in rows[1:]], device=device), right=True)
    offset, size, first = tensor_on(list(zip(*rows, strict=True)), device=device)[:, leaf]
    starts = (offset + (blocks - first) * size - rank * k).clamp(0, k)
    is_mixed = len({row[1] for row in rows[:-1]}) > 1
    last = first_and_last[:, 1] - first_and_last[:, 0]
    return BlockMap(
        spec_id=spec_id,
        scales_id=scales_id,
        blocks=blocks,
        starts=starts,
        single=size == 1 if is_mixed else None,
        last=last,
    )


def _leaf_rows(spec_id: int, scales_id: int) -> list[tuple[int, int, int]]:
    """Return for each leaf its offset in the unit, the size of its blocks, and its first block; then for padding."""
    spec, numbers = traced_spec(spec_id), traced_spec(scales_id)
    sizes = [1 if a == b else _BLOCK_ELEMENTS for a, b in zip(spec.shapes, numbers.shapes, strict=True)]
    padding = spec.shard_numel * spec.ranks + 1
    return list(zip(spec.offsets, [*sizes, padding], numbers.offsets, strict=True))


def _block_at(spec_id: int, scales_id: int, position: int) -> int:
    """Return the index of the block of an element of a unit; the count of blocks for padding."""
    spec = traced_spec(spec_id)
    leaf = bisect.bisect_right(spec.offsets[1:], position)
    offset, size, first = _leaf_rows(spec_id, scales_id)[leaf]
    return first + (position - offset) // size


@assume_constant_result
def _border_blocks(spec_id: int, scales_id: int) -> tuple[tuple[int, int], ...]:
    """Return for each rank the blocks of the first and of the last element of its shard, padding left out."""
    spec = traced_spec(spec_id)
    starts = [min(r * spec.shard_numel, spec.numel) for r in range(spec.ranks + 1)]
    pairs = [(a, max(b - 1, a)) for a, b in itertools.pairwise(starts)]
    return tuple([(_block_at(spec_id, scales_id, a), _block_at(spec_id, scales_id, b)) for a, b in pairs])


@assume_constant_result
def _owned_blocks(spec_id: int, scales_id: int) -> tuple[tuple[int, int], ...]:
    """Return for each rank the range of blocks whose last elements lie in its shard."""
    firsts = [first for first, _ in _border_blocks(spec_id, scales_id)]
    return tuple(itertools.pairwise([*firsts, traced_spec(scales_id).numel]))
