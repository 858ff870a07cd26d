"""The leaves of a unit side by side in one buffer, so that a rank's own part of them is a slice of it."""

from typing import Any

import torch

from fzero import tree
from fzero._torch import view_of
from fzero.layout.boxes import is_box
from fzero.layout.spec import spec_of
from fzero.layout.units import CutUnit, cut_units

__all__ = ["lay_side_by_side"]


def lay_side_by_side(leaves: list[Any], cut: Any) -> None:
    """Copy the leaves of each unit into one buffer, and let each go as soon as it is there.

    What is alive beside them, if nobody else holds the leaves: one unit. Units of one leaf, and boxes, stay as they
    are.

    Args:
        leaves: of a tree of whole leaves, changed in place.
        cut: the tree in boxes, without memory, as `partition` makes it.
    """
    paths, entries, _ = tree.flatten_with_paths(cut, is_box)
    for unit in cut_units(paths, entries):
        one = {index: leaves[position] for position, index in unit.members}
        if len(one) > 1 and _are_alike(one.values()):
            one.clear()
            _fill(leaves, unit)


def _are_alike(leaves: Any) -> bool:
    """Return whether values are tensors of one dtype on one device."""
    return all(isinstance(x, torch.Tensor) for x in leaves) and len({(x.dtype, x.device) for x in leaves}) == 1


def _fill(leaves: list[Any], unit: CutUnit) -> None:
    """Put the leaves of a unit into a buffer of their own."""
    spec = spec_of(unit.uid)
    first = leaves[unit.members[0][0]]
    buffer = torch.empty(spec.numel, dtype=first.dtype, device=first.device)
    del first
    placed: dict[int, torch.Tensor] = {}
    for position, index in unit.members:
        if index not in placed:  # else it is tied
            placed[index] = view_of(buffer, spec.offsets[index], spec.shapes[index])
            placed[index].copy_(leaves[position])
        leaves[position] = placed[index]
