"""Owner assignments: divide the matrices of many units among the ranks, so that each rank has full matrices to update.

A rank's shards hold ranges of matrices. The rank sends each range to the matrix's owner, and receives the ranges of the
matrices that it owns, by one all_to_all. Every rank sends parts of equal size and owns equally many matrices of each
shape; the rest is padded with zeros. Matrices of one shape go to the owners in equal runs, in the order of their units:
neighbours have one owner. If the number of repeated blocks is a multiple of the number of ranks, every rank sends its
shard and no more. In the worst case, few matrices on many ranks, the parts are as large as those of an all_gather.

| row | forward | transpose |
| --- | --- | --- |
| shards_to_parts | from a rank's shards to one part for each owner, `[N, c]` | parts_to_shards |
| parts_to_matrices | from the received parts to the owner's matrices, `[q, r, c]` for each shape | matrices_to_parts |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fzero._registry import Registry
from fzero._torch import assume_constant_result
from fzero._torch.types import Tensors
from fzero.axes import Binding
from fzero.collectives import AssignmentOptions, LinearMap, RankOperation, add_rows

__all__ = ["Matrix", "OwnerAssignment", "intern_assignment", "lookup_assignment"]


class Matrix(NamedTuple):
    """A matrix that a rank will own: its unit, its offset there, its shape and its split.

    Attributes:
        unit: the index of its unit in the assignment.
        start: the index of its first element in the flat unit.
        rows: its height.
        columns: its width.
        split: a label. Only matrices of one shape and one split share a stack.
    """

    unit: int
    start: int
    rows: int
    columns: int
    split: tuple[tuple[str, int], ...] = ()

    @property
    def stack(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        """The rows, columns and split that all matrices of a stack share."""
        return (self.rows, self.columns, self.split)


class _OwnedRange(NamedTuple):
    """The range of a matrix that one rank holds.

    Attributes:
        matrix: the matrix's index in the assignment.
        start: the range's first element in the rank's shard.
        size: elements of the range.
        offset: the range's first element in the part that the rank sends to the owner.
    """

    matrix: int
    start: int
    size: int
    offset: int


@dataclass(frozen=True)
class OwnerAssignment:
    """A division of matrices among the ranks of an axis.

    Attributes:
        ranks: the number of ranks, N.
        shard_numels: the number of elements of each unit's shard.
        matrices: the matrices of all units.
    """

    ranks: int
    shard_numels: tuple[int, ...]
    matrices: tuple[Matrix, ...]

    @cached_property
    def stacks(self) -> tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...]:
        """The rows, columns and split of each stack."""
        return tuple(dict.fromkeys(m.stack for m in self.matrices))

    @cached_property
    def stack_sizes(self) -> tuple[int, ...]:
        """The number of matrices of each stack that a rank owns, matrices of zeros included."""
        return tuple(-(-sum(m.stack == stack for m in self.matrices) // self.ranks) for stack in self.stacks)

    @cached_property
    def owner_stacks(self) -> tuple[tuple[tuple[int | None, ...], ...], ...]:
        """The matrices that each rank owns in each stack, None for a matrix of zeros.

        The first owner of a stack follows the last owner of the stack before, so that rank 0 does not own all matrices
        of rare shapes.
        """
        table = [[[None] * stack_size for stack_size in self.stack_sizes] for _ in range(self.ranks)]
        first_index = 0
        for s, (stack, stack_size) in enumerate(zip(self.stacks, self.stack_sizes, strict=True)):
            members = [i for i, m in enumerate(self.matrices) if m.stack == stack]
            for j, i in enumerate(members):
                table[(first_index + j // stack_size) % self.ranks][s][j % stack_size] = i  # pyright: ignore
            first_index += -(-len(members) // stack_size)
        return tuple(tuple(tuple(x) for x in rows) for rows in table)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The rank that owns each matrix."""
        return {i: r for r, stacks in enumerate(self.owner_stacks) for stack in stacks for i in stack if i is not None}

    @cached_property
    def ranges(self) -> tuple[tuple[tuple[_OwnedRange, ...], ...], ...]:
        """The ranges that each rank sends to each owner."""
        table: list[list[list[_OwnedRange]]] = [[[] for _ in range(self.ranks)] for _ in range(self.ranks)]
        for i, m in enumerate(self.matrices):
            k, stop = self.shard_numels[m.unit], m.start + m.rows * m.columns
            if stop == m.start:  # a matrix without elements
                continue
            for sender in range(m.start // k, -(-stop // k)):
                range_start, range_stop = max(m.start, sender * k), min(stop, sender * k + k)
                part = table[sender][self.owner[i]]
                offset = part[-1].offset + part[-1].size if part else 0
                part.append(_OwnedRange(i, range_start - sender * k, range_stop - range_start, offset))
        return tuple(tuple(tuple(part) for part in parts) for parts in table)

    @cached_property
    def used_numel(self) -> int:
        """The largest number of elements that ranges fill in a part."""
        return max([p.offset + p.size for parts in self.ranges for part in parts for p in part], default=0)

    @cached_property
    def part_numel(self) -> int:
        """The length of every part: room for the fullest one, and one element for each matrix of zeros of an owner."""
        return self.used_numel + max(
            [sum(i is None for stack in stacks for i in stack) for stacks in self.owner_stacks], default=0
        )


_ASSIGNMENTS = Registry[OwnerAssignment]()


@assume_constant_result
def intern_assignment(ranks: int, shard_numels: tuple[int, ...], matrices: tuple[Matrix, ...]) -> int:
    """Intern an assignment, and return its id: equal assignments have one id."""
    return _ASSIGNMENTS.id_of(OwnerAssignment(ranks, shard_numels, tuple([Matrix(*m) for m in matrices])))


def lookup_assignment(assignment_id: int) -> OwnerAssignment:
    """Return the assignment with this id."""
    return _ASSIGNMENTS.value(assignment_id)


def _concatenate_and_pad(parts: Sequence[torch.Tensor], size: int, like: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors along the last dimension, and pad the result with zeros up to a size."""
    padding = size - sum(x.shape[-1] for x in parts)
    zeros = [like.new_zeros((*like.shape[:-1], padding))] if padding or not parts else []
    return torch.cat([*parts, *zeros], dim=-1)


def _shards_to_parts(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Pack the ranges of a rank's shards `[.., k]` into one part for each owner: `[.., N, c]`."""
    rows = []
    for part in assignment.ranges[rank]:
        ranges = [xs[assignment.matrices[p.matrix].unit].narrow(-1, p.start, p.size) for p in part]
        rows.append(_concatenate_and_pad(ranges, assignment.part_numel, xs[0]))
    return [torch.stack(rows, dim=-2)]


def _parts_to_shards(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Put the ranges of parts `[.., N, c]` back into shards `[.., k]`; all other elements are zeros."""
    (buffer,) = xs
    # for each unit its ranges: start, size, owner, offset
    by_unit: list[list[tuple[int, int, int, int]]] = [[] for _ in assignment.shard_numels]
    for owner, part in enumerate(assignment.ranges[rank]):
        for p in part:
            by_unit[assignment.matrices[p.matrix].unit].append((p.start, p.size, owner, p.offset))
    shards = []
    for k, ranges in zip(assignment.shard_numels, by_unit, strict=True):
        end = 0
        parts: list[torch.Tensor] = []
        for start, size, owner, offset in sorted(ranges):
            if start > end:
                parts.append(buffer.new_zeros((*buffer.shape[:-2], start - end)))
            parts.append(buffer.select(-2, owner).narrow(-1, offset, size))
            end = start + size
        shards.append(_concatenate_and_pad(parts, k, buffer.select(-2, 0)))
    return shards


def _parts_to_matrices(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Assemble a rank's matrices, `[.., q, r, c]` for each shape, from the parts that it received, `[.., N, c]`."""
    (buffer,) = xs
    received: dict[int, list[torch.Tensor]] = {}
    for sender, parts in enumerate(assignment.ranges):
        for p in parts[rank]:
            received.setdefault(p.matrix, []).append(buffer.select(-2, sender).narrow(-1, p.offset, p.size))
    stacks = []
    for (rows, columns, _), stack in zip(assignment.stacks, assignment.owner_stacks[rank], strict=True):
        flat = [
            _concatenate_and_pad([] if i is None else received.get(i, []), rows * columns, buffer.select(-2, 0))
            for i in stack
        ]
        stacks.append(torch.stack(flat, dim=-2).unflatten(-1, (rows, columns)))
    return stacks


def _matrices_to_parts(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Pack a rank's matrices into the parts `[.., N, c]` that go back to the ranks that sent the ranges.

    Each part also carries an element of each matrix of zeros. Otherwise the update of that matrix would be dead code on
    some ranks, and the graph of a jitted step would differ by rank.
    """
    flat = {
        i: matrices.select(-3, row).flatten(-2)
        for matrices, stack in zip(xs, assignment.owner_stacks[rank], strict=True)
        for row, i in enumerate(stack)
        if i is not None
    }
    rows = []
    like = xs[0].select(-3, 0).flatten(-2)
    offsets = dict.fromkeys(flat, 0)
    for parts in assignment.ranges:
        ranges = []
        for p in parts[rank]:
            ranges.append(flat[p.matrix].narrow(-1, offsets[p.matrix], p.size))
            offsets[p.matrix] += p.size
        rows.append(_concatenate_and_pad(ranges, assignment.used_numel, like))
    unused = [
        matrices.select(-3, row).flatten(-2).narrow(-1, 0, 1)
        for matrices, stack in zip(xs, assignment.owner_stacks[rank], strict=True)
        for row, i in enumerate(stack)
        if i is None
    ]
    end = _concatenate_and_pad(unused, assignment.part_numel - assignment.used_numel, like)
    return [torch.stack([torch.cat([row, end], dim=-1) for row in rows], dim=-2)]


def _add_row(name: str, transpose: str, f: Callable[[OwnerAssignment, int, Tensors], list[torch.Tensor]]) -> None:
    """Add a row to the table of collectives: a linear map that each rank computes by itself."""

    def all_ranks(n: int, options: AssignmentOptions, xs: Tensors) -> Tensors:
        ranks = [f(lookup_assignment(options.assignment_id), r, [x[r] for x in xs]) for r in range(n)]
        return [torch.stack(list(ys)) for ys in zip(*ranks, strict=True)]

    def local(binding: Binding, options: AssignmentOptions, xs: Tensors) -> Tensors:
        return f(lookup_assignment(options.assignment_id), binding.rank, xs)

    add_rows(LinearMap(name, RankOperation("", all_ranks, local), transpose))


_add_row("shards_to_parts", "parts_to_shards", _shards_to_parts)
_add_row("parts_to_shards", "shards_to_parts", _parts_to_shards)
_add_row("parts_to_matrices", "matrices_to_parts", _parts_to_matrices)
_add_row("matrices_to_parts", "parts_to_matrices", _matrices_to_parts)
