"""Torch's caching allocator for GPUs, simulated: the segments that it reserves for the storages of a plan.

A plan knows in which order a step takes and frees which bytes, and the allocator is deterministic. So the memory that
it reserves is known before the step runs. The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default
settings, in torch 2.11 to 2.15; `tests/cuda` compares them with torch's own.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["AllocatorPeaks", "simulate_allocator"]

_MB = 2**20
_ROUNDING_BYTES = 512  # a block's size is a multiple
_ADDRESS_GAP = 2**50  # addresses between two segments, so that they never touch
_SIMULATED_STEPS = 2  # what the first one leaves in pieces may cost the second one a segment


class AllocatorPeaks(NamedTuple):
    """What torch's caching allocator takes for a step, in bytes.

    Attributes:
        allocated_bytes: the peak of its blocks, which are as large as what was asked for, or rounded up.
        reserved_bytes: the segments that it takes from the device and keeps. They run out first.
    """

    allocated_bytes: int
    reserved_bytes: int


class _CachedBlock:
    """A block of a segment, between its neighbours.

    Attributes:
        size: in bytes.
        address: the first one; segments have addresses in the order in which they are made.
        free: whether the block can be given out.
        before: the block before it in its segment, or None.
        after: the block after it in its segment, or None.
    """

    __slots__ = ("address", "after", "before", "free", "size")

    def __init__(self, size: int, address: int, before: "_CachedBlock | None" = None) -> None:
        self.size, self.address, self.free = size, address, True
        self.before, self.after = before, None if before is None else before.after
        if before is not None:
            if before.after is not None:
                before.after.before = self
            before.after = self

    def __lt__(self, other: "_CachedBlock") -> bool:
        return (self.size, self.address) < (other.size, other.address)


class _Pool:
    """One of the allocator's two pools: that of small blocks, or that of large ones.

    Attributes:
        small: whether its blocks have at most 1 MB.
        expandable: whether it has one segment, which grows.
        reserved: the bytes of its segments.
        free: its free blocks, the smallest first, of equal ones that with the lowest address.
    """

    def __init__(self, is_small: bool, expandable: bool) -> None:
        self.small, self.expandable = is_small, expandable
        self.reserved = 0
        self.free: list[_CachedBlock] = []
        self._segments = 0
        self._last: _CachedBlock | None = None  # of the segment that grows

    def allocate(self, size: int) -> _CachedBlock:
        """Take the smallest free block that is large enough, or new memory, and give back what is left of it."""
        block = self._best_fit(size) or (self._grow_segment(size) if self.expandable else self._new_segment(size))
        remaining_size = block.size - size
        if remaining_size >= _ROUNDING_BYTES if self.small or self.expandable else remaining_size > _MB:
            block.size = size
            remainder = _CachedBlock(remaining_size, block.address + size, before=block)
            if self._last is block:
                self._last = remainder
            insort(self.free, remainder)
        block.free = False
        return block

    def release(self, block: _CachedBlock) -> None:
        """Free a block, and join it with the free blocks beside it."""
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take_block(neighbour)
                block = self._join_blocks(*sorted((neighbour, block), key=lambda b: b.address))
        insort(self.free, block)

    def _best_fit(self, size: int) -> _CachedBlock | None:
        i = bisect_left(self.free, _CachedBlock(size, -1))
        if self.expandable and i + 1 < len(self.free) and self.free[i] is self._last:
            i += 1  # the block that can grow counts as larger than all others
        return self.free.pop(i) if i < len(self.free) else None

    def _new_segment(self, size: int) -> _CachedBlock:
        total = 20 * _MB if size < 10 * _MB else _round_up(size, 2 * _MB)
        total = 2 * _MB if self.small else total
        self.reserved += total
        self._segments += 1
        return _CachedBlock(total, self._segments * _ADDRESS_GAP)

    def _grow_segment(self, size: int) -> _CachedBlock:
        """Add pages to the end of the segment, whose last block may be free and is part of the new one."""
        page, last_block = (2 if self.small else 20) * _MB, self._last
        if last_block is not None and last_block.free:
            self._take_block(last_block)
        else:
            self._last = last_block = _CachedBlock(
                0, 0 if last_block is None else last_block.address + last_block.size, before=last_block
            )
        total = _round_up(size - last_block.size, page)
        last_block.size += total
        self.reserved += total
        return last_block

    def _take_block(self, block: _CachedBlock) -> None:
        del self.free[bisect_left(self.free, block)]

    def _join_blocks(self, block: _CachedBlock, after: _CachedBlock) -> _CachedBlock:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if self._last is after:
            self._last = block
        return block


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class _Allocator:
    """The allocator of one stream on one device, with the peak of its blocks."""

    def __init__(self, expandable: bool) -> None:
        self._pools = [_Pool(small, expandable) for small in (True, False)]
        self._allocated = self.peak = 0

    @property
    def reserved(self) -> int:
        return sum([pool.reserved for pool in self._pools])

    def allocate(self, size: int) -> tuple[_Pool, _CachedBlock]:
        rounded_size = max(_round_up(size, _ROUNDING_BYTES), _ROUNDING_BYTES)
        pool = self._pools[rounded_size > _MB]
        block = pool.allocate(rounded_size)
        self._allocated += block.size
        self.peak = max(self.peak, self._allocated)
        return pool, block

    def release(self, pool: _Pool, block: _CachedBlock) -> None:
        self._allocated -= block.size
        pool.release(block)


def simulate_allocator(
    persistent: Iterable[int], ranges: Sequence[tuple[int, int, int]], *, expandable_segments: bool
) -> AllocatorPeaks:
    """Run a step twice through torch's caching allocator, and return the bytes that it takes.

    Args:
        persistent: the bytes of the storages that live throughout, such as the step's arguments, in the order in which
            they are made.
        ranges: the other storages: the positions of a storage's first and last operation, and its bytes. Storages of
            one operation are made in their order, and freed after all of them are made.
        expandable_segments: whether segments grow, as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    allocator = _Allocator(expandable_segments)
    for size in persistent:
        if size:
            allocator.allocate(size)
    allocated_at: dict[int, list[int]] = {}
    freed_at: dict[int, list[int]] = {}
    for i, (start, stop, size) in enumerate(ranges):
        if size:
            allocated_at.setdefault(start, []).append(i)
            freed_at.setdefault(stop, []).append(i)
    for _ in range(_SIMULATED_STEPS):
        blocks: dict[int, tuple[_Pool, _CachedBlock]] = {}
        for position in sorted({*allocated_at, *freed_at}):
            for i in allocated_at.get(position, ()):
                blocks[i] = allocator.allocate(ranges[i][2])
            for i in freed_at.get(position, ()):
                allocator.release(*blocks.pop(i))
    return AllocatorPeaks(allocator.peak, allocator.reserved)
