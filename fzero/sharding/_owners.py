"""Owner assignments: the matrices of many units divided among the ranks, so that each rank has a share of them whole.

A rank's shards hold pieces of matrices. It sends each piece to the matrix's owner, and gets the pieces of its own: one
all_to_all. Every rank sends parts of equal size and owns equally many matrices of each shape; the rest is padded with
zeros. So the matrices of one shape, in the order of their units, go to the owners in equal runs: neighbours to one
owner. Where repeated blocks are as many as a multiple of the ranks, every rank sends its shard and no more. At worst,
where few matrices are spread over many ranks, the parts are as large as an all_gather's.

| row | forward | transpose |
| --- | --- | --- |
| lay_out | a rank's shards to its parts for each owner, `[N, c]` | lay_back |
| take_up | the parts that arrived to the owner's matrices, `[q, r, c]` a shape | hand_back |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fzero._torch import assume_constant_result
from fzero.axes import Binding
from fzero.collectives import AssignmentOptions, LinearMap, Tensors, add_row

__all__ = ["Matrix", "OwnerAssignment", "assignment_number", "assignment_of"]


class Matrix(NamedTuple):
    """A matrix to be owned: its unit, its first element there, its shape and what marks its kind.

    Attributes:
        unit: which of the assignment's units holds it.
        start: of its first element in the flat unit.
        rows: its height.
        columns: its width.
        kind: matrices of one shape and another kind lie in another stack.
    """

    unit: int
    start: int
    rows: int
    columns: int
    kind: tuple[tuple[str, int], ...] = ()

    @property
    def stack(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        """What the matrices of a stack share."""
        return (self.rows, self.columns, self.kind)


class _Piece(NamedTuple):
    """What one rank holds of a matrix: which, at which element of its shard, how many, and where in its part."""

    matrix: int
    at: int
    size: int
    place: int


@dataclass(frozen=True)
class OwnerAssignment:
    """A division of matrices among the ranks of an axis.

    Attributes:
        ranks: their number, N.
        shards: the length of each unit's shard.
        matrices: the matrices of all units.
    """

    ranks: int
    shards: tuple[int, ...]
    matrices: tuple[Matrix, ...]

    @cached_property
    def stacks(self) -> tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...]:
        """What the matrices of each stack share, in the order of the stacks."""
        return tuple(dict.fromkeys(m.stack for m in self.matrices))

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """How many matrices of each stack a rank owns, zeros included."""
        return tuple(-(-sum(m.stack == stack for m in self.matrices) // self.ranks) for stack in self.stacks)

    @cached_property
    def owned(self) -> tuple[tuple[tuple[int | None, ...], ...], ...]:
        """For each rank and stack the matrices that it owns, None for zeros.

        Each stack's first owner comes behind the last one's last, so that rare shapes do not all meet on rank 0.
        """
        table = [[[None] * height for height in self.heights] for _ in range(self.ranks)]
        first = 0
        for s, (stack, height) in enumerate(zip(self.stacks, self.heights, strict=True)):
            mine = [i for i, m in enumerate(self.matrices) if m.stack == stack]
            for j, i in enumerate(mine):
                table[(first + j // height) % self.ranks][s][j % height] = i  # pyright: ignore
            first += -(-len(mine) // height)
        return tuple(tuple(tuple(x) for x in rows) for rows in table)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The rank that owns each matrix."""
        return {i: r for r, stacks in enumerate(self.owned) for stack in stacks for i in stack if i is not None}

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[_Piece, ...], ...], ...]:
        """What each rank sends to each owner."""
        found: list[list[list[_Piece]]] = [[[] for _ in range(self.ranks)] for _ in range(self.ranks)]
        for i, m in enumerate(self.matrices):
            k, stop = self.shards[m.unit], m.start + m.rows * m.columns
            for sender in range(m.start // k, -(-stop // k)) if stop > m.start else ():
                first, last = max(m.start, sender * k), min(stop, sender * k + k)
                part = found[sender][self.owner[i]]
                place = part[-1].place + part[-1].size if part else 0
                part.append(_Piece(i, first - sender * k, last - first, place))
        return tuple(tuple(tuple(part) for part in parts) for parts in found)

    @cached_property
    def filled(self) -> int:
        """How much of a part pieces may fill."""
        return max([p.place + p.size for parts in self.pieces for part in parts for p in part], default=0)

    @cached_property
    def part(self) -> int:
        """The length of a part: of the longest, and an element for each matrix of zeros that a rank may own."""
        return self.filled + max([sum(i is None for own in stacks for i in own) for stacks in self.owned], default=0)


_ASSIGNMENTS: list[OwnerAssignment] = []
_NUMBERS: dict[OwnerAssignment, int] = {}


@assume_constant_result
def assignment_number(ranks: int, shards: tuple[int, ...], matrices: tuple[Matrix, ...]) -> int:
    """Return the number of the assignment with these attributes."""
    assignment = OwnerAssignment(ranks, shards, tuple([Matrix(*m) for m in matrices]))
    if assignment not in _NUMBERS:
        _NUMBERS[assignment] = len(_ASSIGNMENTS)
        _ASSIGNMENTS.append(assignment)
    return _NUMBERS[assignment]


def assignment_of(number: int) -> OwnerAssignment:
    """Return the assignment with this number."""
    return _ASSIGNMENTS[number]


# ---------------------------------------------------------------- what one rank does


def _joined(parts: Sequence[torch.Tensor], size: int, like: torch.Tensor) -> torch.Tensor:
    """Concatenate along the last dimension, and then zeros up to a size."""
    missing = size - sum(x.shape[-1] for x in parts)
    zeros = [like.new_zeros((*like.shape[:-1], missing))] if missing or not parts else []
    return torch.cat([*parts, *zeros], dim=-1)


def _pack_for_owners(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Cut shards `[.., k]` into a part for each owner: `[.., N, c]`."""
    rows = []
    for part in assignment.pieces[rank]:
        cut = [xs[assignment.matrices[p.matrix].unit].narrow(-1, p.at, p.size) for p in part]
        rows.append(_joined(cut, assignment.part, xs[0]))
    return [torch.stack(rows, dim=-2)]


def _unpack_from_shards(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Put parts `[.., N, c]` back into their places in shards `[.., k]`, among zeros."""
    (buffer,) = xs
    places: list[list[tuple[int, int, int, int]]] = [
        [] for _ in assignment.shards
    ]  # of each unit: at, size, owner, place
    for owner, part in enumerate(assignment.pieces[rank]):
        for p in part:
            places[assignment.matrices[p.matrix].unit].append((p.at, p.size, owner, p.place))
    shards = []
    for k, pieces in zip(assignment.shards, places, strict=True):
        end, parts = 0, []
        for at, size, owner, place in sorted(pieces):
            if at > end:
                parts.append(buffer.new_zeros((*buffer.shape[:-2], at - end)))
            parts.append(buffer.select(-2, owner).narrow(-1, place, size))
            end = at + size
        shards.append(_joined(parts, k, buffer.select(-2, 0)))
    return shards


def _matrices_of_owner(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Put the parts that arrived, `[.., N, c]`, together to the rank's own matrices: `[.., q, r, c]` for each shape."""
    (buffer,) = xs
    found: dict[int, list[torch.Tensor]] = {}
    for sender, parts in enumerate(assignment.pieces):
        for p in parts[rank]:
            found.setdefault(p.matrix, []).append(buffer.select(-2, sender).narrow(-1, p.place, p.size))
    stacks = []
    for (rows, columns, _), own in zip(assignment.stacks, assignment.owned[rank], strict=True):
        flat = [_joined([] if i is None else found.get(i, []), rows * columns, buffer.select(-2, 0)) for i in own]
        stacks.append(torch.stack(flat, dim=-2).unflatten(-1, (rows, columns)))
    return stacks


def _parts_of_owner(assignment: OwnerAssignment, rank: int, xs: Tensors) -> list[torch.Tensor]:
    """Cut a rank's own matrices into the parts that they came in: `[.., N, c]`.

    An element of each matrix of zeros goes along. Else its iteration would be dead code on some ranks, and a jitted
    step another graph on each.
    """
    flat = {
        i: stack.select(-3, slot).flatten(-2)
        for stack, own in zip(xs, assignment.owned[rank], strict=True)
        for slot, i in enumerate(own)
        if i is not None
    }
    rows, like, done = [], xs[0].select(-3, 0).flatten(-2), dict.fromkeys(flat, 0)
    for parts in assignment.pieces:
        cut = []
        for p in parts[rank]:
            cut.append(flat[p.matrix].narrow(-1, done[p.matrix], p.size))
            done[p.matrix] += p.size
        rows.append(_joined(cut, assignment.filled, like))
    unused = [
        stack.select(-3, slot).flatten(-2).narrow(-1, 0, 1)
        for stack, own in zip(xs, assignment.owned[rank], strict=True)
        for slot, i in enumerate(own)
        if i is None
    ]
    end = _joined(unused, assignment.part - assignment.filled, like)
    return [torch.stack([torch.cat([row, end], dim=-1) for row in rows], dim=-2)]


def _add(name: str, transpose: str, f: Callable[[OwnerAssignment, int, Tensors], list[torch.Tensor]]) -> None:
    """Add a row of what each rank does by itself."""

    def stacked(n: int, options: AssignmentOptions, xs: Tensors) -> Tensors:
        ranks = [f(assignment_of(options.number), r, [x[r] for x in xs]) for r in range(n)]
        return [torch.stack(list(ys)) for ys in zip(*ranks, strict=True)]

    def local(binding: Binding, options: AssignmentOptions, xs: Tensors) -> Tensors:
        return f(assignment_of(options.number), binding.rank, xs)

    add_row(LinearMap(name, wire="", stacked=stacked, local=local, transpose=transpose, replicated=False))


_add("lay_out", "lay_back", _pack_for_owners)
_add("lay_back", "lay_out", _unpack_from_shards)
_add("take_up", "hand_back", _matrices_of_owner)
_add("hand_back", "take_up", _parts_of_owner)
