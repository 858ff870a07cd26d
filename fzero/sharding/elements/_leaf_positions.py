"""An id for each element of a leaf: equal on any layout, so that draws by it are, too.

It consists of the leaf's id, the CRC of its path, and the element's position in the full leaf. So it depends on
no unit, number of ranks or split.
"""

import binascii
import math

import torch

from fzero._torch import assume_constant_result, tensor_on
from fzero.axes import axis_index
from fzero.sharding._spec import spec_of, traced_spec, unit_index
from fzero.sharding._stacked_items import item_of, stacked_of
from fzero.sharding.elements._segments import segment_ids

__all__ = ["element_ids_of_leaf", "element_ids_of_shard"]

_POSITION_BITS = 32  # of the position; the CRC has as many


def _leaf_id(path: str) -> int:
    """Return the id of a leaf, an int64 whose lowest 32 bits are 0."""
    return (binascii.crc32(path.encode()) - 2**31) << _POSITION_BITS


def element_ids_of_leaf(path: str, leaf: torch.Tensor) -> torch.Tensor:
    """Return an id for each element of a full leaf: int64, of the shape of the leaf."""
    return torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape) ^ _leaf_id(path)


def element_ids_of_shard(spec_id: int, device: torch.device) -> torch.Tensor:
    """Return an id for each element of this rank's shard of a unit: int64 `[k]`, those of its full leaves."""
    spec = traced_spec(spec_id)
    k = spec.shard_numel
    leaf = segment_ids(spec_id, device)
    unit_position = unit_index(spec_id, device) * k + torch.arange(k, device=device)
    position = unit_position - tensor_on([*spec.offsets[:-1], spec.numel], device=device)[leaf]
    axis, rows = _leaf_ids(spec_id)  # a row for each rank along the axis of a stacked list, else one
    leaf_ids = tensor_on(rows, device=device)
    row = axis_index(axis, device=device).reshape(1) if axis else torch.zeros(1, dtype=torch.int64, device=device)
    if any(not split.stacked for split in spec.split):
        position = _position_in_full_leaf(spec_id, position, leaf)
    return position ^ leaf_ids.index_select(0, row).squeeze(0)[leaf]


@assume_constant_result
def _leaf_ids(spec_id: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Return an axis, and for each rank along it the ids of a unit's leaves; "" if all ranks have the same leaves.

    The padding, and a slot of a stacked list that holds no item, have the id 0.
    """
    spec = spec_of(spec_id)
    along, stacked = stacked_of(spec) or (None, None)
    if along is None or stacked is None:
        return "", ((*[_leaf_id(path) for path in spec.paths], 0),)
    rows = []
    for rank in range(along.size):
        row = []
        for path in spec.paths:
            item = item_of(path, "", stacked)
            if item is None:
                row.append(_leaf_id(path))
                continue
            index = item.indices[rank]
            row.append(0 if index is None else _leaf_id(item.path(index)))
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
            at = ndim - len(spec.shapes[i]) + dim
            full_shapes[i][at] *= split.size
            counts[i][at], is_split[i][at] = split.size, 1
        rank = axis_index(split.axis, device=device)
        scale = tensor_on([*counts, [1] * ndim], device=device)
        part_indices = part_indices * scale + rank * tensor_on([*is_split, [0] * ndim], device=device)
    sizes = tensor_on([*part_shapes, [1] * (ndim - 1) + [position.numel() * spec.ranks + 1]], device=device)
    full_strides = [[math.prod(shape[d + 1 :]) for d in range(ndim)] for shape in full_shapes]
    strides = tensor_on([*full_strides, [0] * (ndim - 1) + [1]], device=device)
    first_positions = (part_indices * sizes * strides).sum(1)  # of this rank's parts in the full leaves: [m + 1]
    full_position, rest = first_positions[leaf], position  # [k]
    for d in reversed(range(ndim)):
        size = sizes[:, d].clamp(min=1)[leaf]
        full_position = full_position + rest % size * strides[:, d][leaf]
        rest = torch.div(rest, size, rounding_mode="floor")
    return full_position
