"""The layout of a tree on the ranks of a mesh, as numbers. Manifests store it; it says what each rank reads and writes.

A sharded tree keeps its structure, so a leaf has the same path at every stage and on every mesh. A unit is flat, so a
rank holds one range of each leaf. The layout is therefore a rule: a few numbers for each unit, for any number of ranks.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero._format import format_tensor
from fzero.checkpoint.layout._chunks import Chunk, ChunkRange, full_chunk
from fzero.ranks import index_along
from fzero.sharding import Split

__all__ = ["ALIGNMENT", "Leaf", "LeafGroup", "LeafPiece", "TreeLayout"]

ALIGNMENT = 64  # bytes; the data in a file begins at a multiple of it


class Leaf(NamedTuple):
    """A full leaf, as the user knows it.

    Attributes:
        path: its keys, joined by dots.
        shape: the shape of the full leaf.
        dtype: the dtype of its elements.
        per_rank: whether the leaf is a `PerRank` value: row r is the value of rank r.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_rank: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of the full leaf."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the full leaf."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return format_tensor(self.dtype, self.shape)


class LeafGroup(NamedTuple):
    """Leaves that are concatenated and then sharded into equal parts.

    Attributes:
        leaves: the indices of the leaves.
        axes: the axes that the group is sharded over; none if each rank holds the whole group.
        shard_numel: elements of a shard, padding included.
        split: the axes along which each leaf is split before the leaves are concatenated.
        coordinates: the ranks that hold the group, as coordinates along some axes; empty if all ranks hold it. Ranks
            at other coordinates have other groups: each stage of a pipeline has its own blocks.
        copies: the positions of unused copies of leaves. A load fills a copy like the leaf; a save skips it.
    """

    leaves: tuple[int, ...]
    axes: tuple[str, ...]
    shard_numel: int
    split: tuple[Split, ...] = ()
    coordinates: tuple[tuple[str, int], ...] = ()
    copies: tuple[int, ...] = ()


class LeafPiece(NamedTuple):
    """The part of a leaf that a rank holds.

    Attributes:
        leaf: the index of the leaf.
        group: the index of its group.
        range: the range of the leaf's elements.
        offset: where the piece begins in the rank's part of the group, in elements.
    """

    leaf: int
    group: int
    range: ChunkRange
    offset: int

    @property
    def numel(self) -> int:
        """The number of elements of the piece."""
        return self.range.stop - self.range.start


@dataclass(frozen=True)
class TreeLayout:
    """The layout of a tree on the ranks of a mesh.

    Attributes:
        mesh: the name and size of each axis, the slowest first.
        leaves: the distinct leaves.
        groups: the groups; each leaf is in one of them.
        ties: every further path of a tied leaf, with the leaf's first path.
        values: the JSON value at each path that holds no tensor.
    """

    mesh: tuple[tuple[str, int], ...]
    leaves: tuple[Leaf, ...]
    groups: tuple[LeafGroup, ...]
    ties: dict[str, str]
    values: dict[str, Any]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod([size for _, size in self.mesh])

    @cached_property
    def leaf_index(self) -> dict[str, int]:
        """The index of the leaf at each path."""
        indices = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        return {**indices, **{path: indices[first] for path, first in self.ties.items()}}

    @cached_property
    def home(self) -> dict[int, tuple[int, int]]:
        """The group of each leaf, and the leaf's position in the group."""
        return {
            i: (g, position)
            for g, group in enumerate(self.groups)
            for position, i in enumerate(group.leaves)
            if position not in group.copies
        }

    def part_shape(self, g: int, position: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a leaf in a group, by the leaf's position: it is divided by `split`."""
        shape = list(self.leaves[self.groups[g].leaves[position]].shape)
        for s in self.groups[g].split:
            shape[s.dims[position]] //= s.size
        return tuple(shape)

    @cached_property
    def offsets(self) -> list[list[int]]:
        """Where each leaf begins in the concatenated group, in elements, for each group; the last entry is the end."""
        result = []
        for g, group in enumerate(self.groups):
            sizes = [math.prod(self.part_shape(g, position)) for position in range(len(group.leaves))]
            result.append(list(itertools.accumulate(sizes, initial=0)))
        return result

    def index(self, axes: tuple[str, ...], rank: int) -> int:
        """Return a rank's index along some axes, the slowest axis first."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.mesh):
            rank, coordinates[name] = divmod(rank, size)
        return index_along(self._axis_sizes, coordinates, axes)

    def rank(self, *positions: tuple[tuple[str, ...], int]) -> int:
        """Return the rank at an index along each of several groups of axes: the inverse of `index`."""
        coordinates: dict[str, int] = {}
        for axes, index in positions:
            for name in reversed(axes):
                index, coordinates[name] = divmod(index, self._axis_sizes[name])
        return index_along(self._axis_sizes, coordinates, self._axis_sizes)

    @cached_property
    def _axis_sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along some axes."""
        return math.prod([self._axis_sizes[name] for name in axes])

    def replicated_axes(self, g: int) -> tuple[str, ...]:
        """Return the axes whose ranks hold the same elements of a group."""
        group = self.groups[g]
        group_axes = (*group.axes, *[s.axis for s in group.split], *[name for name, _ in group.coordinates])
        return tuple([name for name, _ in self.mesh if name not in group_axes])

    def local_span(self, g: int, rank: int) -> tuple[int, int]:
        """Return the range of the concatenated group that a rank holds, without padding."""
        group, end = self.groups[g], self.offsets[g][-1]
        if any(self.index((name,), rank) != coordinate for name, coordinate in group.coordinates):
            return 0, 0
        start = self.index(group.axes, rank) * group.shard_numel
        return min(start, end), min(start + group.shard_numel, end)

    def owned_span(self, g: int, rank: int) -> tuple[int, int]:
        """Return the range of a group that a rank writes. Ranks that hold the same elements write equal parts."""
        start, stop = self.local_span(g, rank)
        shared_axes = self.replicated_axes(g)
        k = -(-(stop - start) // self.size(shared_axes))
        first = min(start + self.index(shared_axes, rank) * k, stop)
        return first, min(first + k, stop)

    def chunk(self, g: int, position: int, rank: int) -> Chunk:
        """Return a rank's part of the leaf at a position in a group."""
        chunk = list(full_chunk(self.part_shape(g, position)))
        for s in self.groups[g].split:  # several axes may split one dimension, the slowest first
            offset, size = chunk[s.dims[position]]
            chunk[s.dims[position]] = (offset * s.size + self.index((s.axis,), rank), size)
        return tuple([(index * size, size) for index, size in chunk])

    def local_pieces(self, rank: int) -> Iterator[LeafPiece]:
        """List the pieces that a rank holds."""
        for g in range(len(self.groups)):
            yield from self._group_pieces(g, rank, *self.local_span(g, rank), skip=())

    def owned_pieces(self, rank: int) -> Iterator[LeafPiece]:
        """List the pieces that a rank writes, in file order: larger elements first, so that all are aligned."""
        for g in self.order:
            yield from self._group_pieces(g, rank, *self.owned_span(g, rank), skip=self.groups[g].copies)

    def _group_pieces(self, g: int, rank: int, start: int, stop: int, skip: Sequence[int]) -> Iterator[LeafPiece]:
        """List a rank's pieces in a range of a group, without the leaves at the positions `skip`."""
        base, _ = self.local_span(g, rank)
        offsets = self.offsets[g]
        for position, i in enumerate(self.groups[g].leaves):
            a, b = max(start, offsets[position]), min(stop, offsets[position + 1])
            if a < b and position not in skip:
                chunk_range = ChunkRange(self.chunk(g, position, rank), a - offsets[position], b - offsets[position])
                yield LeafPiece(i, g, chunk_range, a - base)

    @cached_property
    def order(self) -> list[int]:
        """The groups in file order."""
        return sorted(range(len(self.groups)), key=lambda g: -self.itemsize(g))

    def itemsize(self, g: int) -> int:
        """Return the bytes of one element of a group."""
        return self.leaves[self.groups[g].leaves[0]].dtype.itemsize

    def _count_written(self, g: int, x: int) -> int:
        """Count how many of a group's first `x` elements are written."""
        offsets = self.offsets[g]
        return x - sum([min(x, offsets[p + 1]) - min(x, offsets[p]) for p in self.groups[g].copies])

    @cached_property
    def starts(self) -> Callable[[int], list[int]]:
        """A function of a rank: the list of where each group begins in the data of its file, in bytes, and the end."""
        return functools.cache(self._compute_starts)

    def _compute_starts(self, rank: int) -> list[int]:
        starts, group_start = [0] * (len(self.groups) + 1), 0
        for g in self.order:
            start, stop = self.owned_span(g, rank)
            starts[g] = group_start
            group_start += (self._count_written(g, stop) - self._count_written(g, start)) * self.itemsize(g)
        starts[-1] = group_start
        return starts

    def writers(self, i: int, target: ChunkRange) -> Iterator[tuple[int, int, ChunkRange]]:
        """Find the ranks that write the elements of a range of a leaf.

        Yields:
            A rank, the byte at which its elements begin in its file's data, and the range of the leaf that it writes.
        """
        g, position = self.home[i]
        leaf_start, leaf_stop = self.offsets[g][position : position + 2]  # of the leaf in the concatenated group
        for rank, chunk in self._chunk_owners(g, position, target):
            start, stop = self.owned_span(g, rank)
            begin, end = max(start, leaf_start), min(stop, leaf_stop)
            before = self._count_written(g, begin) - self._count_written(g, start)
            yield (
                rank,
                self.starts(rank)[g] + before * self.itemsize(g),
                ChunkRange(chunk, begin - leaf_start, end - leaf_start),
            )

    def _chunk_owners(self, g: int, position: int, target: ChunkRange) -> Iterator[tuple[int, Chunk]]:
        """Yield each rank that writes elements of a range of a leaf, with the chunk of the leaf that the rank holds."""
        group, shared_axes = self.groups[g], self.replicated_axes(g)
        split_axes = tuple([s.axis for s in group.split])
        stage = [((name,), coordinate) for name, coordinate in group.coordinates]

        def rank_at(part: int, shard: int, writer: int) -> int:
            return self.rank((split_axes, part), (group.axes, shard), (shared_axes, writer), *stage)

        leaf_start, leaf_stop = self.offsets[g][position : position + 2]
        for part in range(self.size(split_axes)):
            chunk = self.chunk(g, position, rank_at(part, 0, 0))
            if not _have_common_element(chunk, target.chunk):
                continue
            low, high = (
                (leaf_start + target.start, leaf_start + target.stop)
                if chunk == target.chunk
                else (leaf_start, leaf_stop)
            )
            for shard in _intervals_between(low, high, group.shard_numel):
                start, stop = self.local_span(g, rank_at(part, shard, 0))
                share = -(-(stop - start) // self.size(shared_axes))  # by each of the ranks that hold the shard
                for writer in _intervals_between(max(low, start) - start, min(high, stop) - start, share):
                    yield rank_at(part, shard, writer), chunk


def _intervals_between(start: int, stop: int, size: int) -> range:
    """List the intervals of length `size` that contain elements from `start` to before `stop`."""
    return range(start // size, -(-stop // size)) if start < stop else range(0)


def _have_common_element(first: Chunk, second: Chunk) -> bool:
    """Return whether two chunks of a tensor have an element in common."""
    return all(max(a, b) < min(a + n, b + m) for (a, n), (b, m) in zip(first, second, strict=True))
