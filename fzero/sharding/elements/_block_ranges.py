"""Ranges of a unit, and their blocks: consecutive elements of a leaf that share a scale.

The nodes of a graph take a range as plain lists of numbers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["UnitRange", "block_range"]


class _BlockPart(NamedTuple):
    """Neighbouring elements of a range, from one or more leaves, whose first and last blocks are filled with zeros.

    Attributes:
        offset: the index of the first element in the range.
        size: the number of elements.
        before: the number of elements of the first block that lie before the range.
        after: the number of elements that the last block lacks.
    """

    offset: int
    size: int
    before: int
    after: int


class UnitRange(NamedTuple):
    """The blocks of a range of a unit.

    Attributes:
        parts: the parts of the range, in order.
        first: the number of the first block in the unit.
        count: the number of blocks.
        length: the number of elements of the range; those after the last part are padding.
    """

    parts: tuple[_BlockPart, ...]
    first: int
    count: int
    length: int

    def as_lists(self) -> list[Any]:
        """Return the range as lists of ints, which a node of a graph can hold."""
        return [[list(part) for part in self.parts], self.first, self.count, self.length]

    @staticmethod
    def from_lists(lists: Sequence[Any]) -> "UnitRange":
        """Return the range of these lists."""
        parts, first, count, length = lists
        return UnitRange(tuple([_BlockPart(*part) for part in parts]), first, count, length)

    def to_blocks(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """Return a range `[.., length]` as blocks `[.., count, block]`: a view if no block is cut."""
        lead = x.shape[:-1]
        pieces: list[torch.Tensor] = []
        for part in self.parts:
            if part.before:
                pieces.append(x.new_zeros((*lead, part.before)))
            pieces += [x.narrow(-1, part.offset, part.size)]
            if part.after:
                pieces.append(x.new_zeros((*lead, part.after)))
        if not pieces:
            return x.new_zeros((*lead, 0, block))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)).reshape(*lead, self.count, block)

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks `[.., count, block]` as the range `[.., length]`, with zeros for padding."""
        flat, start = blocks.flatten(-2), 0
        pieces: list[torch.Tensor] = []
        for part in self.parts:
            pieces.append(flat.narrow(-1, start + part.before, part.size))
            start += part.before + part.size + part.after
        padding = self.length - sum([part.size for part in self.parts])
        if padding or not pieces:
            pieces.append(torch.zeros((*flat.shape[:-1], padding), dtype=flat.dtype, device=flat.device))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def own(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """Return the numbers of this range's blocks, from those of all blocks of the unit `[.., blocks]`."""
        return of_blocks.narrow(-1, self.first, self.count)


def block_range(sizes: Sequence[int], block: int, start: int, stop: int) -> UnitRange:
    """Return the blocks of elements `[start, stop)` of a unit whose leaves have these sizes.

    Example:
        >>> found = block_range([5, 8], 4, 2, 9)
        >>> found.parts[0], found.count
        (_BlockPart(offset=0, size=3, before=2, after=3), 3)
    """
    parts: list[_BlockPart] = []
    first_block, count, offset, blocks = 0, 0, 0, 0
    for size in sizes:
        begin, end = max(start - offset, 0), min(stop - offset, size)  # in the leaf
        if begin < end:
            part = _BlockPart(offset + begin - start, end - begin, begin % block, -end % block)
            first_block = first_block if parts else blocks + begin // block
            count += (part.before + part.size + part.after) // block
            if parts and not (parts[-1].after or part.before):  # one view for both
                part = _BlockPart(parts[-1].offset, parts[-1].size + part.size, parts.pop().before, part.after)
            parts.append(part)
        offset += size
        blocks += -(-size // block)
    return UnitRange(tuple(parts), first_block, count, stop - start)
