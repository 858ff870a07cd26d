"""state_bytes: how much of a tree one rank holds."""

import math
from typing import Any

from fzero import tree
from fzero.layout.boxes import axes_of, is_box
from fzero.ranks.mesh import Mesh

__all__ = ["state_bytes"]


def state_bytes(values: Any, mesh: Mesh) -> int:
    """Count the bytes that one rank of a mesh holds of a tree, in any layout; tied leaves count once.

    Args:
        values: a tree of plain tensors, which every rank holds, and of boxes, of which it holds its own piece. Tensors
            on the meta device count as if they had memory.
        mesh: the ranks. In a simulation boxes hold the pieces of all.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=4)
        >>> state_bytes({"plain": torch.zeros(100), "batch": mesh.split(torch.zeros(100))}, mesh)
        500
    """
    total, seen = 0, set()
    for x in tree.flatten(values, is_box)[0]:
        for axes, leaf in zip(axes_of(x, mesh.axis_names), tree.flatten(x)[0], strict=True):
            n = math.prod([size for name, size in mesh.shape if name in axes]) if mesh.simulated else 1
            for tensor in tree.tensors(leaf):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    total += tensor.nbytes // n
    return total
