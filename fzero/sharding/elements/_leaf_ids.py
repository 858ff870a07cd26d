"""Leaf ids: the leaf of each element of a flat shard. Optimizers need it to be exact on shards.

A third-party optimizer may make the padding of a shard nonzero. Padding lies in no leaf, so nothing here counts it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._torch import assume_constant_result, tensor_on
from fzero._tracebacks import api_boundary
from fzero.axes import axis_index
from fzero.collectives import psum
from fzero.sharding._boxes import Shard, is_box, make_box
from fzero.sharding._spec import Piece, lookup_spec, traced_spec, unit_index
from fzero.sharding._stacked_items import find_item, find_stacked_list
from fzero.sharding.units import ShardedUnit, map_units, sharded_units
from fzero.tree import Tree

__all__ = ["abstract", "check_on_device", "check_per_leaf", "global_norm", "leaf_ids", "per_leaf", "zero_padding"]


def leaf_ids(spec_id: int, device: torch.device, piece: Piece | None = None) -> torch.Tensor:
    """Return the index of the leaf of each element of this rank's shard. Padding has the number of leaves as its index.

    Returns:
        An int64 tensor `[k]`; with `piece`, only the elements of that piece.
    """
    k = traced_spec(spec_id).shard_numel
    start, stop = (0, k) if piece is None else (piece.start, piece.stop)
    position = unit_index(spec_id, device) * k + torch.arange(start, stop, device=device)
    return torch.bucketize(position, tensor_on(traced_spec(spec_id).offsets[1:], device=device), right=True)


def zero_padding(box: Shard) -> torch.Tensor:
    """Return a shard's data `[k]` with zeros in the padding, and in the slots of a stacked list that hold no item.

    Raises:
        ValueError: if a part of the shard lies on the host.
    """
    check_on_device(box, "a norm or a test of all elements")
    k, numel = traced_spec(box.spec_id).shard_numel, traced_spec(box.spec_id).numel
    x = _zero_unused_items(box)
    if k * traced_spec(box.spec_id).ranks == numel:
        return x
    position = unit_index(box.spec_id, x.device) * k + torch.arange(k, device=x.device)
    return torch.where(position < numel, x, torch.zeros_like(x))


@assume_constant_result
def _unused_items(spec_id: int) -> tuple[str, tuple[tuple[bool, ...], ...]]:
    """Return an axis, and for each rank along it whether each leaf of a unit is unused; `("", ())` if all are used."""
    spec = lookup_spec(spec_id)
    along, stacked = find_stacked_list(spec) or (None, None)
    if along is None or stacked is None:
        return "", ()
    items = [find_item(path, "", stacked) for path in spec.paths]
    rows = [tuple([item is not None and item.indices[rank] is None for item in items]) for rank in range(along.size)]
    return (along.axis, tuple(rows)) if any(map(any, rows)) else ("", ())


def _zero_unused_items(box: Shard) -> torch.Tensor:
    axis, rows = _unused_items(box.spec_id + 0)
    if not rows:
        return box.data
    x, rank_index = box.data, axis_index(axis, device=box.data.device).reshape(1)
    if all(len(set(row)) == 1 for row in rows):  # one value for all leaves, as in a unit that is one block
        unused = tensor_on([row[0] for row in rows], device=x.device).index_select(0, rank_index)
    else:
        table = tensor_on([(*row, True) for row in rows], device=x.device)  # the last column: padding
        unused = table.index_select(0, rank_index).squeeze(0)[leaf_ids(box.spec_id, x.device)]
    return torch.where(unused, torch.zeros_like(x), x)


def check_on_device(box: Shard, label: str) -> None:
    """Check that the whole shard lies on the device, where ranks communicate.

    Raises:
        ValueError: if a part lies on the host. The message names the unit.
    """
    if "host" in [piece.space for piece in traced_spec(box.spec_id).pieces]:
        raise ValueError(
            f"{label} was given {box!r}, of which a part lies on the host: in a chain, put transformations that read "
            'whole leaves before optim.offload, or use optim.offload(opt, ratio, update_on="device")'
        )


@api_boundary
def global_norm(params: Tree) -> torch.Tensor:
    """Return the 2-norm of all elements of a tree, exact on any layout.

    One scalar psum for each set of axes sums the squares of the shards over their ranks. Replicated and tied leaves
    count once; padding and a pipeline's idle slots do not count. Sums are in float32 at least.

    Returns:
        A 0-d tensor, equal on all ranks if the replicated leaves are equal.

    Example:
        >>> import fzero
        >>> tree = {"w": torch.tensor([3.0, 0.0, 0.0]), "b": torch.tensor(4.0)}
        >>> global_norm(tree)
        tensor(5.)
        >>> fzero.mesh(dp=2).spmd(lambda t: global_norm(fzero.partition(t)))(tree)
        tensor(5.)
    """
    entries = tree.flatten(params, is_box)[0]
    sums_by_axes: dict[tuple[str, ...], torch.Tensor] = {}
    plain: dict[int, torch.Tensor] = {}
    for x in entries:
        if isinstance(x, Shard):
            axes = traced_spec(x.spec_id).varies
            square = _square_in_float32(zero_padding(x))
            sums_by_axes[axes] = sums_by_axes[axes] + square if axes in sums_by_axes else square
        elif isinstance(x, torch.Tensor) and id(x) not in plain:
            plain[id(x)] = _square_in_float32(x)
    squares = [psum(square, axes) for axes, square in sums_by_axes.items()] + list(plain.values())
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device="cpu")


def _square_in_float32(x: torch.Tensor) -> torch.Tensor:
    return at_least_float32(x).square().sum()


def abstract(params: Tree, parts: bool = False) -> Tree:
    """Return the tree with meta tensors of the full leaves' shapes in place of boxes and tensors.

    A leaf that is stacked by rank, such as a leaf of a pipeline's blocks, gets the shape of one item. With `parts`, a
    leaf that is split along an axis gets the shape of this rank's part.

    Example:
        >>> import fzero
        >>> f = lambda t: [tuple(x.shape) for x in fzero.tree.tensors(abstract(fzero.partition(t)))]
        >>> fzero.mesh(dp=2).spmd(f)({"w": torch.ones(2, 3)})
        [(2, 3)]
    """

    def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def full_leaves(unit: ShardedUnit) -> list[torch.Tensor]:
        spec = traced_spec(unit.spec_id)
        # the box's dtype: masters lie in boxes of units whose parameters are narrower
        return [meta(shape, unit.shard.dtype) for shape in (spec.shapes if parts else spec.item_shapes)]

    entries, structure = tree.flatten(map_units(full_leaves, params), is_box)
    plain = [meta(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in entries]
    return tree.unflatten(structure, plain)


def _conflict_message(path: str, other: str) -> str:
    return f"leaves {path!r} and {other!r} are tied, one parameter, and have different values; give both the same value"


def per_leaf(params: Tree, values: Any | Callable[[Any], Any]) -> Tree:
    """Spread one number for each leaf over the elements of a tree of any layout.

    Args:
        params: a full or sharded tree.
        values: a tree of numbers (or bools) with the structure of the full tree; or a function that returns such a
            tree. The function gets a tree of meta tensors with the leaves' shapes.

    Returns:
        A tree like `params`: one number where all elements have the same number, else a tensor `[k]` in the box.

    Raises:
        ValueError: if the structures of `values` and `params` differ, or tied leaves have different values. The message
            names the path.
    """
    out, structure, rows = _number_leaves(params, values)
    for position, box, spec_id, row in rows:
        ranges = traced_spec(spec_id).pieces
        pieces = [_spread_over_piece(row, spec_id, *x) for x in zip(ranges, box.pieces, strict=True)]
        out[position] = make_box(spec_id, pieces)
    return tree.unflatten(structure, out)


def check_per_leaf(params: Tree, values: Any | Callable[[Any], Any]) -> None:
    """Raise the errors of `per_leaf`, without the memory of its result."""
    _number_leaves(params, values)


def _number_leaves(params: Tree, values: Any) -> tuple[list[Any], Any, list[tuple[int, Any, int, list[float]]]]:
    """Return the number of each leaf, the tree's structure, and for each unit its place, box, spec and numbers."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    numbers_tree = values(abstract(params)) if callable(values) else values
    try:
        leaves = tree.leaves_up_to(params, numbers_tree, is_box, names=("params", "the mask"))
    except ValueError as error:
        error.add_note(
            "A mask is a tree of bools like the parameters, or a function that makes one of them: "
            "mask=lambda params: fzero.tree.map(lambda p: p.ndim >= 2, params)"
        )
        raise
    out: list[Any] = [x if x is None or is_box(x) else v for x, v in zip(entries, leaves, strict=True)]
    first_positions: dict[int, int] = {}  # id of a full leaf -> its position
    for position, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            tied = first_positions.setdefault(id(x), position)
            if leaves[tied] != leaves[position]:
                raise ValueError(_conflict_message(paths[tied], paths[position]))
            out[position] = out[tied]  # one object, so that a map over both trees keeps the tie
    rows = []
    for spec_id, box, members in sharded_units(paths, entries):
        by_index: dict[int, float] = {}
        for position, index in members:
            if by_index.setdefault(index, float(leaves[position])) != float(leaves[position]):
                raise ValueError(_conflict_message(lookup_spec(spec_id).paths[index], paths[position]))
        rows.append((members[0][0], box, spec_id, [by_index[i] for i in range(len(by_index))]))
    return out, structure, rows


def _spread_over_piece(row: Sequence[float], spec_id: int, piece: Piece, x: torch.Tensor) -> Any:
    """Return the number for each element of a piece: one number if all are equal, else a tensor."""
    if len(set(row)) == 1:
        return row[0]
    table = tensor_on([*row, 0.0], dtype=x.dtype, device=x.device)
    return table[leaf_ids(spec_id, x.device, piece)]
