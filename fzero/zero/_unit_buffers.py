"""Copy the leaves of each unit into one buffer, so that a rank's part of the unit is a slice of the buffer."""

from typing import Any

import torch

from fzero import tree
from fzero._torch import buffer_view
from fzero.sharding import is_box, lookup_spec, sharded_units

__all__ = ["copy_to_unit_buffers"]


def copy_to_unit_buffers(leaves: list[Any], sharded: Any) -> list[Any]:
    """Empty a list of leaves, and return the leaves with those of each unit copied into one buffer.

    Each leaf is dropped as soon as it is copied. So besides the leaves, memory holds one more unit, if nothing else
    references the leaves. Units of one leaf, and boxes, stay as they are.

    Args:
        leaves: the leaves of a tree of full leaves.
        sharded: the same tree after `partition`, on the meta device.
    """
    results = [*leaves]
    leaves.clear()
    paths, entries, _ = tree.flatten_with_paths(sharded, is_box)
    for spec_id, _, members in sharded_units(paths, entries):
        kinds: set[Any] = {
            (x.dtype, x.device) if isinstance(x, torch.Tensor) else None
            for x in [results[position] for position, _ in members]
        }
        if len({index for _, index in members}) == 1 or len(kinds) > 1 or None in kinds:
            continue
        spec = lookup_spec(spec_id)
        dtype, device = kinds.pop()
        buffer = torch.empty(spec.numel, dtype=dtype, device=device)
        views: dict[int, torch.Tensor] = {}
        for position, index in members:
            if index not in views:  # else the leaf is tied, and copied already
                views[index] = buffer_view(buffer, spec.offsets[index], spec.shapes[index])
                views[index].copy_(results[position])
            results[position] = views[index]
    return results
