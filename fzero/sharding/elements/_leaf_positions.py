"""Random words for each element of a leaf: equal on any layout.

They follow from the leaf's id, the CRC of its path, and the element's position in the full leaf. So they depend on no
unit, number of ranks or split.
"""

import binascii
import math

import torch

from fzero import tree
from fzero._torch import assume_constant_result, tensor_on
from fzero.axes import axis_index
from fzero.random import key_words, words_at
from fzero.sharding._boxes import first_device, is_box
from fzero.sharding._spec import lookup_spec, traced_spec
from fzero.sharding._stacked_items import find_item, find_stacked_list
from fzero.sharding.elements._by_leaf import spread_leaf_values, unit_positions
from fzero.sharding.elements._leaf_ids import leaf_ids
from fzero.tree import Tree

__all__ = ["key_beside", "leaf_bits", "shard_bits"]


def _path_key(path: str) -> int:
    return binascii.crc32(path.encode())


def key_beside(key: torch.Tensor, params: Tree) -> torch.Tensor:
    """Return a copy of a key on the device of a tree's elements, where their bits are drawn.

    A key on the host would be copied for each leaf and unit, and the host would wait for the device each time.
    """
    device = first_device(tree.flatten(params, is_box)[0])
    return key.clone() if device.type == "meta" else key.to(device, copy=True)


def leaf_bits(key: torch.Tensor, path: str, leaf: torch.Tensor) -> torch.Tensor:
    """Draw 32 random bits for each element of a full leaf: int32, of the shape of the leaf, on its device."""
    dtype = torch.int32 if leaf.numel() < 2**31 else torch.int64
    position = torch.arange(leaf.numel(), dtype=dtype, device=leaf.device).view(leaf.shape)
    first, second = key_words(key.to(leaf.device), tensor_on(_path_key(path), device=leaf.device))
    return words_at(first, second, position)


def shard_bits(key: torch.Tensor, spec_id: int, device: torch.device) -> torch.Tensor:
    """Draw 32 random bits for each element of this rank's shard of a unit: int32 `[k]`, those of its full leaves."""
    spec = traced_spec(spec_id)
    axis, rows = _path_keys(spec_id)  # a row for each rank along the axis of a stacked list, else one
    path_keys = tensor_on(rows, device=device)
    row = axis_index(axis, device=device).reshape(1) if axis else torch.zeros(1, dtype=torch.int64, device=device)
    words = key_words(key.to(device), path_keys.index_select(0, row).squeeze(0))
    in_unit = unit_positions(spec_id, device)
    offsets = tensor_on([*spec.offsets[:-1], spec.numel], dtype=in_unit.dtype, device=device)
    first_word, second_word, offset = spread_leaf_values(spec_id, in_unit, [*words, offsets])
    position = in_unit - offset
    if any(not split.stacked for split in spec.split):
        position = _position_in_full_leaf(spec_id, position.to(torch.int64), leaf_ids(spec_id, device))
    return words_at(first_word, second_word, position)


@assume_constant_result
def _path_keys(spec_id: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Return an axis, and for each rank along it the keys of a unit's leaves; "" if all ranks have the same leaves.

    The padding, and a slot of a stacked list that holds no item, have the key 0.
    """
    spec = lookup_spec(spec_id)
    along, stacked = find_stacked_list(spec) or (None, None)
    if along is None or stacked is None:
        return "", ((*[_path_key(path) for path in spec.paths], 0),)
    rows = []
    for rank in range(along.size):
        row = []
        for path in spec.paths:
            item = find_item(path, "", stacked)
            if item is None:
                row.append(_path_key(path))
                continue
            index = item.indices[rank]
            row.append(0 if index is None else _path_key(item.path(index)))
        rows.append((*row, 0))
    return along.axis, tuple(rows)


def _position_in_full_leaf(spec_id: int, position: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return the positions in the full leaves of elements whose positions in this rank's parts are given.

    Args:
        spec_id: the unit's spec, with m leaves of up to d dimensions.
        position: int64 `[k]`, the position of each element in this rank's part of its leaf.
        leaf: int64 `[k]`, the index of each element's leaf; m for the padding.
    """
    spec, device = traced_spec(spec_id), position.device
    ndim = max([len(shape) for shape in spec.shapes])
    part_shapes = [(*[1] * (ndim - len(shape)), *shape) for shape in spec.shapes]
    full_shapes = [list(shape) for shape in part_shapes]
    part_indices = torch.zeros(len(part_shapes) + 1, ndim, dtype=torch.int64, device=device)  # of this rank: [m + 1, d]
    for split in spec.split:
        if split.stacked:
            continue
        counts, is_split = [[1] * ndim for _ in part_shapes], [[0] * ndim for _ in part_shapes]
        for i, dim in enumerate(split.dims):
            leaf_dim = ndim - len(spec.shapes[i]) + dim
            full_shapes[i][leaf_dim] *= split.size
            counts[i][leaf_dim], is_split[i][leaf_dim] = split.size, 1
        rank = axis_index(split.axis, device=device)
        scale = tensor_on([*counts, [1] * ndim], device=device)
        part_indices = part_indices * scale + rank * tensor_on([*is_split, [0] * ndim], device=device)
    sizes = tensor_on([*part_shapes, [1] * (ndim - 1) + [position.numel() * spec.ranks + 1]], device=device)
    full_strides = [[math.prod(shape[d + 1 :]) for d in range(ndim)] for shape in full_shapes]
    strides = tensor_on([*full_strides, [0] * (ndim - 1) + [1]], device=device)
    first_positions = (part_indices * sizes * strides).sum(1)  # of this rank's parts in the full leaves: [m + 1]
    full_position, remainder = first_positions[leaf], position  # [k]
    for d in reversed(range(ndim)):
        size = sizes[:, d].clamp(min=1)[leaf]
        full_position = full_position + remainder % size * strides[:, d][leaf]
        remainder = torch.div(remainder, size, rounding_mode="floor")
    return full_position
