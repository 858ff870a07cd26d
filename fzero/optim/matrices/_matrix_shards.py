"""A function of matrices, on any layout: each rank computes its share of the matrices, each of which it has in full."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes import join_axes
from fzero.collectives import NO_AXIS, AssignmentOptions, DimOptions, all_gather, apply, own_part
from fzero.sharding import (
    Matrix,
    OwnerAssignment,
    Shard,
    ShardedUnit,
    intern_assignment,
    is_box,
    lookup_assignment,
    sharded_units,
    traced_spec,
    unit_axes,
)
from fzero.tree import Tree

__all__ = ["map_matrices"]


_MatrixFunction = Callable[[torch.Tensor], torch.Tensor]


def map_matrices(f: _MatrixFunction, values: Tree, is_matrix: Sequence[Any], dtype: torch.dtype | None = None) -> Tree:
    """Apply a function to each matrix of a tree of any layout; all other leaves become zeros.

    Every rank computes the matrices of plain leaves. The matrices of sharded leaves are assigned to the ranks, and each
    rank computes the matrices that it owns. This takes two all_to_alls, one each way, for all units over the same axes.

    Args:
        f: maps a matrix `[r, c]` to another of the same shape, and zeros to zeros.
        values: the tree. A leaf `[.., r, c]` is a stack of matrices.
        is_matrix: for each entry of the flattened tree, with boxes as leaves, whether `f` applies to it.
        dtype: the dtype that matrices are cast to before they are sent; None for no cast.

    Returns:
        A tree like `values`, with the same dtypes.
    """
    paths, entries, structure = tree.flatten_with_paths(values, is_box)
    out: list[Any] = list(entries)
    results: dict[Any, torch.Tensor] = {}
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            key = tree.identity(x)
            if key not in results:
                results[key] = _map_leaf(f, x, dtype) if is_matrix[position] else torch.zeros_like(x)
            out[position] = results[key]
    groups: dict[tuple[Any, ...], list[ShardedUnit]] = {}
    for unit in sharded_units(paths, entries):
        groups.setdefault((traced_spec(unit.spec_id).axes, unit.shard.data.dtype), []).append(unit)
    for units in groups.values():
        indices = [{index for position, index in unit.members if is_matrix[position]} for unit in units]
        shards = _map_shards(f, [unit.shard for unit in units], indices, dtype)
        for unit, data in zip(units, shards, strict=True):
            out[unit.members[0][0]] = Shard(data, unit.spec_id)
    return tree.unflatten(structure, out)


def _map_leaf(f: _MatrixFunction, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not x.numel():
        return x.clone()
    matrices = x.to(dtype or x.dtype).reshape(-1, *x.shape[-2:])  # [n, r, c]
    return _map_stack(f, matrices).view(x.shape).to(x.dtype)


def _map_stack(f: _MatrixFunction, matrices: torch.Tensor) -> torch.Tensor:
    """Apply `f` to the matrices of `[n, r, c]` one by one: in the memory of one matrix, and with torch's exact bits."""
    return torch.stack([f(m) for m in matrices.unbind()])


def _map_shards(
    f: _MatrixFunction, boxes: Sequence[Shard], indices: Sequence[set[int]], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Apply `f` to the matrices of sharded units over the same axes, and return a shard of results for each box.

    `indices` lists the leaves of each unit that hold matrices.
    """
    first_axis, *other_axes = join_axes(unit_axes(boxes[0].spec_id)) or [NO_AXIS]
    xs = [box.data.to(dtype or box.data.dtype) for box in boxes]
    for a in other_axes[::-1]:  # the axes have no joint group: gather over the rest, and assign over the slowest axis
        xs = [_apply_along(a, "all_gather", x) for x in xs]
    ranks = first_axis.size
    sizes = tuple([traced_spec(box.spec_id).shard_numel * math.prod([a.size for a in other_axes]) for box in boxes])
    matrices = [m for i, box in enumerate(boxes) for m in _unit_matrices(i, box.spec_id, indices[i])]
    if not matrices:
        return [torch.zeros_like(box.data) for box in boxes]
    assignment_id = intern_assignment(ranks, sizes, tuple(matrices))
    assignment, options = lookup_assignment(assignment_id), AssignmentOptions(assignment_id)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        return _apply_along(first_axis, "all_to_all", x, -2) if assignment.part_numel and ranks > 1 else x

    (parts,) = apply(first_axis.token, "shards_to_parts", first_axis.binding, options, *xs)
    stacks = apply(first_axis.token, "parts_to_matrices", first_axis.binding, options, exchange(parts))
    results = [
        _map_owner_stack(f, stack, split) for stack, split in zip(stacks, _stack_splits(assignment), strict=True)
    ]
    (parts,) = apply(first_axis.token, "matrices_to_parts", first_axis.binding, options, *results)
    xs = apply(first_axis.token, "parts_to_shards", first_axis.binding, options, exchange(parts))
    for a in other_axes:
        xs = [_apply_along(a, "own_part", x) for x in xs]
    return [x.to(box.data.dtype) for x, box in zip(xs, boxes, strict=True)]


def _apply_along(axis: Any, name: str, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    (y,) = apply(axis.token, name, axis.binding, DimOptions(dim), x)
    return y


def _stack_splits(assignment: OwnerAssignment) -> list[tuple[tuple[str, int], ...]]:
    return [split for _, _, split in assignment.stacks]


def _map_owner_stack(f: _MatrixFunction, stack: torch.Tensor, split: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Apply `f` to a stack `[q, r, c]` of the owner's matrices; each rank of the axes in `split` has a part of each."""
    for axis, dim in reversed(split):
        stack = all_gather(stack, axis, dim=dim)
    stack = _map_stack(f, stack)
    for axis, dim in split:
        stack = own_part(stack, axis, dim=dim)
    return stack


def _unit_matrices(unit: int, spec_id: int, indices: set[int]) -> list[Matrix]:
    """List the matrices of a unit, the assignment's number `unit`; the split of a matrix says how its leaf is split."""
    spec = traced_spec(spec_id)
    matrices: list[Matrix] = []
    for index, shape in enumerate(spec.shapes):
        size = math.prod(shape)
        if index not in indices or not size:
            continue
        rows, columns = shape[-2:]
        # a leaf [.., r, c] that is split along another dimension, as experts are, has full matrices
        split = [(s.axis, s.dims[index] - len(shape)) for s in spec.split if s.dims[index] >= len(shape) - 2]
        first = spec.offsets[index]
        starts = range(first, first + size, rows * columns)
        matrices += [Matrix(unit=unit, start=start, rows=rows, columns=columns, split=tuple(split)) for start in starts]
    return matrices
