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

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from fzero._torch import assume_constant_result
from fzero.collectives import all_gather, psum_scatter
from fzero.sharding._boxes import Shard, box_of
from fzero.sharding._spec import Spec, intern, spec_of, traced_spec, unit_index

__all__ = ["BLOCK", "BlockMap", "block_shape", "block_spec", "blocks_of_leaf", "map_of_blocks"]

BLOCK = 256  # elements


def block_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the numbers of a leaf's blocks.

    Example:
        >>> block_shape((3, 512)), block_shape((3, 100)), block_shape(())
        ((3, 2), (2,), (1,))
    """
    if shape and shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (-(-math.prod(shape) // BLOCK),)


def blocks_of_leaf(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """View or copy a full leaf as its blocks `[blocks, 256]`, the last one filled with zeros, for its numbers.

    If the leaf has a number for each element, a block is one element: `[n, 1]`.
    """
    if x.shape == numbers.shape:
        return x.reshape(-1, 1)
    padding = numbers.numel() * BLOCK - x.numel()
    flat = x.reshape(-1)
    return (torch.cat([flat, flat.new_zeros(padding)]) if padding else flat).view(-1, BLOCK)


# ---------------------------------------------------------------- the unit of the numbers


@assume_constant_result
def block_spec(spec_id: int, by_element: tuple[bool, ...]) -> int:
    """Return the spec_id of the unit of the blocks' numbers.

    Args:
        spec_id: the unit of the elements.
        by_element: for each leaf, whether it has a number for each element.

    Raises:
        ValueError: if an axis splits a leaf in parts that cut its blocks. The message names the leaf.
    """
    spec = spec_of(spec_id)
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
    has_rows = len(shape) == len(item) and item[-1] % BLOCK == 0
    for s in spec.split:
        dim = s.dims[index] - lead
        if s.stacked:
            continue
        if shape[dim] % s.size if has_rows else dim or math.prod(part) % BLOCK:
            raise ValueError(
                f"leaf {spec.paths[index]!r} is {list(spec.full_shapes[index])}, and {s.axis}={s.size} splits its "
                f"dimension {s.dims[index]} in parts that cut blocks of {BLOCK} elements, so its numbers would "
                "depend on the number of ranks: leave the leaf in full precision, by "
                'moments=optim.Moments("int8", full=...)'
            )
        shape[dim] //= s.size
    return (*part[:lead], *shape)


# ---------------------------------------------------------------- the blocks of a shard


class BlockMap(NamedTuple):
    """The block of each element of a rank's shard.

    Attributes:
        spec_id: the unit of the elements.
        numbers_id: the unit of the blocks' numbers.
        index: the index of each element's block among the unit's blocks, int64 `[k]`; their count for padding.
        single: whether each element is a block of its own: a bool, or a bool tensor `[k]`.
    """

    spec_id: int
    numbers_id: int
    index: torch.Tensor
    single: torch.Tensor | bool

    def gather(self, boxes: Sequence[Shard]) -> list[torch.Tensor]:
        """Return the number of each element's block, `[k]`, from shards of numbers; 0 for padding."""
        spec = traced_spec(self.numbers_id)
        shards = torch.stack([box.data for box in boxes])  # [m, b / N]
        full = all_gather(shards, spec.axes, dim=-1) if spec.ranks > 1 else shards
        full = torch.cat([full[:, : spec.numel], full.new_zeros(len(boxes), 1)], dim=1)
        return [x[self.index] for x in full.unbind()]

    def maxima(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the largest absolute value in each block that this rank has a part of: `[b]` for each x.

        The other ranks' parts of the block count, too. Of a block of one element it is the element, with its sign.
        """
        blocks = traced_spec(self.numbers_id).numel
        local = torch.stack([self._maxima_of_own(x) for x in xs])  # [m, b]
        spec = traced_spec(self.spec_id)
        if spec.ranks == 1 or not blocks:
            return list(local.unbind())
        borders = torch.tensor(_borders(self.spec_id, self.numbers_id), device=local.device)  # [N, 2]
        rank = unit_index(self.spec_id).reshape(1).to(local.device)
        own = borders.index_select(0, rank).squeeze(0)  # [2]
        at_borders = all_gather(local.index_select(1, own.clamp(max=blocks - 1)), spec.axes, dim=-1)  # [m, 2 N]
        for i in range(2):
            same = borders.flatten() == own[i]
            border = at_borders.masked_fill(~same, -math.inf).amax(1, keepdim=True)
            local = torch.where(torch.arange(blocks, device=local.device) == own[i], border, local)
        return list(local.unbind())

    def _maxima_of_own(self, x: torch.Tensor) -> torch.Tensor:
        blocks = traced_spec(self.numbers_id).numel
        if isinstance(self.single, torch.Tensor):
            sizes = torch.where(self.single, x, x.abs())
        else:
            sizes = x if self.single else x.abs()
        return x.new_full((blocks + 1,), -math.inf).scatter_reduce(0, self.index, sizes, "amax")[:blocks]

    def of_elements(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the number of each element's block `[k]`, from the numbers of all blocks `[b]`; 0 for padding."""
        return torch.cat([numbers, numbers.new_zeros(1)])[self.index]

    def scatter(self, numbers: Sequence[torch.Tensor]) -> list[Shard]:
        """Return shards of numbers from those that this rank has for the blocks of its elements, `[b]` each.

        Of the ranks that hold parts of a block, the last one sends its number.
        """
        spec = traced_spec(self.numbers_id)
        full = torch.stack(list(numbers))  # [m, b]
        if spec.ranks == 1:
            return [box_of(self.numbers_id, [x]) for x in full.unbind()]
        rank = unit_index(self.spec_id).reshape(1).to(full.device)
        first, stop = torch.tensor(_owned(self.spec_id, self.numbers_id), device=full.device).index_select(0, rank)[0]
        block = torch.arange(spec.numel, device=full.device)
        owned = torch.where((block >= first) & (block < stop), full, torch.zeros_like(full))
        padding = spec.shard_numel * spec.ranks - spec.numel
        owned = torch.cat([owned, owned.new_zeros(len(numbers), padding)], dim=1)
        return [box_of(self.numbers_id, [x]) for x in psum_scatter(owned, spec.axes, dim=-1).unbind()]


def map_of_blocks(spec_id: int, numbers_id: int, device: torch.device) -> BlockMap:
    """Return the block of each element of this rank's shard of a unit.

    Args:
        spec_id: the unit of the elements.
        numbers_id: the unit of the blocks' numbers, by `block_spec`.
        device: the device of the elements.
    """
    spec = traced_spec(spec_id)
    k = spec.shard_numel
    position = unit_index(spec_id).to(device) * k + torch.arange(k, device=device)
    leaf = torch.bucketize(position, torch.tensor(spec.offsets[1:], device=device), right=True)
    rows = [*_leaf_rows(spec_id, numbers_id), (spec.numel, spec.numel + k * spec.ranks + 1, _count(numbers_id))]
    offset, size, first = torch.tensor(list(zip(*rows, strict=True)), device=device)[:, leaf]
    sizes = {row[1] for row in rows[:-1]}
    single = size == 1 if len(sizes) > 1 else sizes == {1}
    return BlockMap(spec_id, numbers_id, first + torch.div(position - offset, size, rounding_mode="floor"), single)


def _count(numbers_id: int) -> int:
    return traced_spec(numbers_id).numel


def _leaf_rows(spec_id: int, numbers_id: int) -> list[tuple[int, int, int]]:
    """Return for each leaf its offset in the unit, the size of its blocks, and its first block."""
    spec, numbers = traced_spec(spec_id), traced_spec(numbers_id)
    sizes = [1 if a == b else BLOCK for a, b in zip(spec.shapes, numbers.shapes, strict=True)]
    return list(zip(spec.offsets, sizes, numbers.offsets, strict=False))


def _block_at(spec_id: int, numbers_id: int, position: int) -> int:
    """Return the index of the block of an element of a unit; the count of blocks for padding."""
    spec = traced_spec(spec_id)
    if position >= spec.numel:
        return _count(numbers_id)
    sizes = [math.prod(shape) for shape in spec.shapes]
    leaf = next(i for i, size in enumerate(sizes) if spec.offsets[i] <= position < spec.offsets[i] + size)
    offset, size, first = _leaf_rows(spec_id, numbers_id)[leaf]
    return first + (position - offset) // size


@assume_constant_result
def _borders(spec_id: int, numbers_id: int) -> tuple[tuple[int, int], ...]:
    """Return for each rank the blocks of the first and of the last element of its shard."""
    spec = traced_spec(spec_id)
    k = spec.shard_numel
    ends = [(r * k, min(r * k + k, spec.numel) - 1) for r in range(spec.ranks)]
    count = _count(numbers_id)
    return tuple(
        [
            (_block_at(spec_id, numbers_id, a), _block_at(spec_id, numbers_id, b)) if a <= b else (count, count)
            for a, b in ends
        ]
    )


@assume_constant_result
def _owned(spec_id: int, numbers_id: int) -> tuple[tuple[int, int], ...]:
    """Return for each rank the range of blocks whose last elements lie in its shard."""
    spec, count = traced_spec(spec_id), _count(numbers_id)
    firsts = [_block_at(spec_id, numbers_id, r * spec.shard_numel) for r in range(spec.ranks)]
    return tuple(itertools.pairwise([*firsts, count]))
