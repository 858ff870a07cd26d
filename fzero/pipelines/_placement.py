"""Which rank holds which blocks, and in which slot: blocks of all ranks are stacked, slot by slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fzero import tree
from fzero.schedules import Schedule

__all__ = ["Placement", "even", "placed"]


@dataclass(frozen=True)
class Placement:
    """Where blocks live.

    A rank's slots are counted through its stages, from the first to the last. Ranks have equally many; where a rank has
    fewer blocks, the rest of its slots are idle.

    Attributes:
        blocks: by rank and slot, the number of the block; None for an idle slot.
        slots: by stage, its slots on the rank that holds it, in order, without idle ones.
        chunks: by the number of a rank's stage (its first, its second), the slots that it may fill.
        stage: by rank and chunk, the stage; None where a rank holds fewer.
    """

    blocks: tuple[tuple[int | None, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    stage: tuple[tuple[int | None, ...], ...]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return sum(len(slots) for slots in self.slots)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By block, the rank and the slot."""
        found = {b: (r, s) for r, row in enumerate(self.blocks) for s, b in enumerate(row) if b is not None}
        return tuple([found[b] for b in range(self.depth)])

    def stack(self, blocks: Sequence[Any]) -> list[Any]:
        """Stack blocks by slot: leaves `[ranks, ...]`. An idle slot has a copy of some block, which nobody uses."""
        rows = [[b for b in column if b is not None] for column in zip(*self.blocks, strict=True)]
        stacked = []
        for column, some in zip(zip(*self.blocks, strict=True), rows, strict=True):
            chosen = [blocks[some[0] if b is None else b] for b in column]
            stacked.append(tree.map(lambda *xs: torch.stack(xs), *chosen))
        return stacked

    def unstack(self, slots: Sequence[Any]) -> list[Any]:
        """List the blocks of stacked slots: views of their leaves."""
        return [tree.map(lambda x, r=r: x[r], slots[s]) for r, s in self.places]


def even(depth: int, stages: int) -> tuple[int, ...]:
    """Deal blocks to stages as evenly as can be; those in the middle get what is left, for embedding and head."""
    least, left = divmod(depth, stages)
    middle = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))[:left]
    return tuple([least + (s in middle) for s in range(stages)])


def placed(schedule: Schedule, counts: Sequence[int]) -> Placement:
    """Place blocks on the ranks of a schedule.

    Args:
        schedule: says which rank holds which stage.
        counts: by stage, how many blocks it has.
    """
    ranks = range(schedule.ranks)
    mine = [[s for s, rank in enumerate(schedule.home) if rank == r] for r in ranks]
    chunks, slot = [], 0
    for k in range(max(map(len, mine))):
        size = max([counts[stages[k]] for stages in mine if k < len(stages)])
        chunks.append(tuple(range(slot, slot + size)))
        slot += size
    first = [sum(counts[:s]) for s in range(schedule.stages)]
    rows: list[list[int | None]] = [[None] * slot for _ in ranks]
    slots: list[tuple[int, ...]] = [()] * schedule.stages
    for r in ranks:
        for k, s in enumerate(mine[r]):
            slots[s] = chunks[k][: counts[s]]
            for j, place in enumerate(slots[s]):
                rows[r][place] = first[s] + j
    stage = tuple([(*stages, *[None] * (len(chunks) - len(stages))) for stages in mine])
    return Placement(tuple(map(tuple, rows)), tuple(slots), tuple(chunks), stage)
