"""state_bytes: how much of a tree one rank holds."""

import math
from typing import Any

from fzero import tree
from fzero.layout.boxes import Shard, axes_of, is_box
from fzero.layout.pieces import spaces
from fzero.ranks.mesh import Mesh

__all__ = ["state_bytes"]


def state_bytes(values: Any, mesh: Mesh, space: str | None = None) -> int:
    """Count the bytes that one rank of a mesh holds of a tree, in any layout; tied leaves count once.

    Args:
        values: a tree of plain tensors, which every rank holds, and of boxes, of which it holds its own piece. Tensors
            on the meta device count as if they had memory.
        mesh: the ranks. In a simulation boxes hold the pieces of all.
        space: "device" or "host" to count what lies in one memory (`optim.offload`); by default both.

    Raises:
        ValueError: if `space` is something else.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=4)
        >>> state_bytes({"plain": torch.zeros(100), "batch": mesh.split(torch.zeros(100))}, mesh)
        500
    """
    if space not in (None, "device", "host"):
        raise ValueError(f'state_bytes: space={space!r}: expected "device", "host" or None')
    total, seen = 0, set()
    for x in tree.flatten(values, is_box)[0]:
        leaves = tree.flatten(x)[0]
        parts = zip(spaces(x), x.parts, strict=True) if isinstance(x, Shard) else [("device", leaves)]
        lies = [
            memory for memory, part in parts for _ in tree.flatten(part)[0]
        ]  # a part may be a tree (optim.leafwise)
        for axes, leaf, memory in zip(axes_of(x, mesh.axis_names), leaves, lies, strict=True):
            if space not in (None, memory):
                continue
            n = math.prod([size for name, size in mesh.shape if name in axes]) if mesh.simulated else 1
            for tensor in tree.tensors(leaf):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    total += tensor.nbytes // n
    return total
