"""A function of matrices, on any layout: each rank computes its share of them, and each matrix is whole for that."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes.scope import joint
from fzero.collectives.invariant import own_part
from fzero.collectives.sums import all_gather
from fzero.collectives.table import NO_AXIS, Along, AssignmentOptions, apply
from fzero.layout.boxes import Shard, is_box
from fzero.layout.owners import Matrix, OwnerAssignment, assignment_number, assignment_of
from fzero.layout.spec import facts, unit_axes
from fzero.layout.units import CutUnit, cut_units
from fzero.tree import Tree

__all__ = ["map_matrices"]

OfMatrix = Callable[[torch.Tensor], torch.Tensor]


def map_matrices(f: OfMatrix, values: Tree, chosen: Sequence[Any], dtype: torch.dtype | None = None) -> Tree:
    """Apply a function to each matrix of a tree of any layout; what is no chosen matrix becomes zeros.

    Each matrix of a plain leaf is computed where it is. Those of sharded leaves are assigned to the ranks, and
    computed by their owners. That takes one all_to_all there and one back for all units over the same axes.

    Args:
        f: takes a matrix `[r, c]` to another of its shape; zeros to zeros.
        values: the tree. A leaf `[.., r, c]` is a stack of matrices.
        chosen: for each leaf, boxes counting as leaves, whether it holds matrices.
        dtype: what matrices are cast to before they are sent; None for none.

    Returns:
        A tree like `values`, of their dtypes.
    """
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    out: list[Any] = list(entries)
    done: dict[Any, torch.Tensor] = {}
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            key = tree.identity(x)
            if key not in done:
                done[key] = _of_leaf(f, x, dtype) if chosen[position] else torch.zeros_like(x)
            out[position] = done[key]
    together: dict[tuple[Any, ...], list[CutUnit]] = {}
    for unit in cut_units(paths, entries):
        together.setdefault((facts(unit.uid).axes, unit.shard.data.dtype), []).append(unit)
    for units in together.values():
        picked = [{index for position, index in unit.members if chosen[position]} for unit in units]
        shards = _of_units(f, [unit.shard for unit in units], picked, dtype)
        for unit, data in zip(units, shards, strict=True):
            out[unit.members[0][0]] = Shard(data, unit.uid)
    return tree.unflatten(structure, out)


def _of_leaf(f: OfMatrix, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not x.numel():
        return x.clone()
    matrices = x.to(dtype or x.dtype).reshape(-1, *x.shape[-2:])  # [n, r, c]
    return _each(f, matrices).view(x.shape).to(x.dtype)


def _each(f: OfMatrix, matrices: torch.Tensor) -> torch.Tensor:
    """Apply `f` to one matrix after the other of `[n, r, c]`: the memory of one, and torch's numbers to the bit."""
    return torch.stack([f(m) for m in matrices.unbind()])


def _of_units(
    f: OfMatrix, boxes: Sequence[Shard], picked: Sequence[set[int]], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Return for each shard its part of the function's values."""
    first, *rest = joint(unit_axes(boxes[0].uid)) or [NO_AXIS]
    xs = [box.data.to(dtype or box.data.dtype) for box in boxes]
    for a in rest[::-1]:  # without a group of their product: assigned over the slowest axis alone
        xs = [_along(a, "all_gather", x) for x in xs]
    ranks, sizes = first.size, tuple([facts(box.uid).shard_numel * math.prod([a.size for a in rest]) for box in boxes])
    matrices = [m for i, box in enumerate(boxes) for m in _matrices(i, box.uid, picked[i])]
    if not matrices:
        return [torch.zeros_like(box.data) for box in boxes]
    number = assignment_number(ranks, sizes, tuple(matrices))
    assignment, options = assignment_of(number), AssignmentOptions(number)

    def sent(x: torch.Tensor) -> torch.Tensor:
        return _along(first, "all_to_all", x, -2) if assignment.part and ranks > 1 else x

    (parts,) = apply(first.token, "lay_out", first.binding, options, *xs)
    stacks = apply(first.token, "take_up", first.binding, options, sent(parts))
    found = [_of_stack(f, stack, kind) for stack, kind in zip(stacks, _kinds(assignment), strict=True)]
    (parts,) = apply(first.token, "hand_back", first.binding, options, *found)
    xs = apply(first.token, "lay_back", first.binding, options, sent(parts))
    for a in rest:
        xs = [_along(a, "own_part", x) for x in xs]
    return [x.to(box.data.dtype) for x, box in zip(xs, boxes, strict=True)]


def _along(axis: Any, name: str, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    (y,) = apply(axis.token, name, axis.binding, Along(dim), x)
    return y


def _kinds(assignment: OwnerAssignment) -> list[tuple[tuple[str, int], ...]]:
    return [kind for _, _, kind in assignment.stacks]


def _of_stack(f: OfMatrix, stack: torch.Tensor, kind: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Apply the function to a stack `[q, r, c]` of matrices, of which each rank of the axes in `kind` has a part."""
    for axis, dim in reversed(kind):
        stack = all_gather(stack, axis, dim=dim)
    stack = _each(f, stack)
    for axis, dim in kind:
        stack = own_part(stack, axis, dim=dim)
    return stack


def _matrices(place: int, uid: int, picked: set[int]) -> list[Matrix]:
    """List the matrices of a unit; those that tensor parallelism cuts are of a kind of their own."""
    known, found = facts(uid), []
    for index, shape in enumerate(known.shapes):
        size = math.prod(shape)
        if index not in picked or not size:
            continue
        rows, columns = shape[-2:]
        # a leaf [.., r, c] that is cut in front of its matrices, as experts are, has whole ones
        cuts = [(s.axis, s.dims[index] - len(shape)) for s in known.split if s.dims[index] >= len(shape) - 2]
        first = known.offsets[index]
        starts = range(first, first + size, rows * columns)
        found += [Matrix(place, start, rows, columns, tuple(cuts)) for start in starts]
    return found
