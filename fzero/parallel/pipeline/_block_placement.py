"""The rank and the slot of each block. The blocks in one slot of all ranks are stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fzero import tree
from fzero.parallel.schedules import PipelineSchedule

__all__ = ["BlockPlacement", "even_counts", "place_blocks"]


@dataclass(frozen=True)
class BlockPlacement:
    """The rank and block slot of each block.

    A rank's slots are numbered through its stages, from the first to the last. All ranks have the same number of slots.
    A rank with fewer blocks leaves some slots idle.

    Attributes:
        blocks: by rank and slot, the number of the block; None for an idle slot.
        block_slots: by stage, the slots that it uses on its rank, in order.
        chunks: by chunk (a rank's first stage, its second, ...), the slots that the chunk may use.
        stage: by rank and chunk, the stage; None if the rank holds fewer stages.
    """

    blocks: tuple[tuple[int | None, ...], ...]
    block_slots: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    stage: tuple[tuple[int | None, ...], ...]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return sum(len(block_slots) for block_slots in self.block_slots)

    @cached_property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """By block, its rank and slot."""
        by_block = {b: (r, s) for r, row in enumerate(self.blocks) for s, b in enumerate(row) if b is not None}
        return tuple([by_block[b] for b in range(self.depth)])

    def stack(self, blocks: Sequence[Any]) -> list[Any]:
        """Stack blocks by slot: leaves `[ranks, ...]`. An idle slot holds a copy of some block, which is not used."""
        rows = [[b for b in column if b is not None] for column in zip(*self.blocks, strict=True)]
        stacked = []
        for column, members in zip(zip(*self.blocks, strict=True), rows, strict=True):
            items = [blocks[members[0] if b is None else b] for b in column]
            stacked.append(tree.map(lambda *xs: torch.stack(xs), *items))
        return stacked

    def unstack(self, block_slots: Sequence[Any]) -> list[Any]:
        """Return the blocks of stacked slots, as views of their leaves."""
        return [tree.map(lambda x, r=r: x[r], block_slots[s]) for r, s in self.positions]


def even_counts(depth: int, stages: int) -> tuple[int, ...]:
    """Spread blocks over stages evenly. The middle stages get one more, since the ends hold embedding and head."""
    base, remainder = divmod(depth, stages)
    middle = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))[:remainder]
    return tuple([base + (s in middle) for s in range(stages)])


def place_blocks(schedule: PipelineSchedule, counts: Sequence[int]) -> BlockPlacement:
    """Place blocks on the ranks of a schedule.

    Args:
        schedule: the schedule, which assigns stages to ranks.
        counts: the number of blocks of each stage.
    """
    ranks = range(schedule.ranks)
    rank_stages = [schedule.stages_on(rank) for rank in ranks]
    chunks = []
    block_slot = 0
    for k in range(max(map(len, rank_stages))):
        size = max([counts[stages[k]] for stages in rank_stages if k < len(stages)])
        chunks.append(tuple(range(block_slot, block_slot + size)))
        block_slot += size
    first_blocks = [sum(counts[:s]) for s in range(schedule.stages)]
    rows: list[list[int | None]] = [[None] * block_slot for _ in ranks]
    block_slots: list[tuple[int, ...]] = [()] * schedule.stages
    for r in ranks:
        for k, s in enumerate(rank_stages[r]):
            block_slots[s] = chunks[k][: counts[s]]
            for j, block_slot in enumerate(block_slots[s]):
                rows[r][block_slot] = first_blocks[s] + j
    stage = tuple([(*stages, *[None] * (len(chunks) - len(stages))) for stages in rank_stages])
    return BlockPlacement(tuple(map(tuple, rows)), tuple(block_slots), tuple(chunks), stage)
