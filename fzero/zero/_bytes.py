"""Count the bytes of a tree that one rank holds, and check that the host has room for offloaded state."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_choice
from fzero._format import format_bytes
from fzero._tracebacks import api_boundary
from fzero.optim import Optimizer
from fzero.ranks import Mesh
from fzero.sharding import Shard, is_box, leaf_axes, spaces
from fzero.tree import Tree

__all__ = ["check_host_memory", "state_bytes"]


@api_boundary
def state_bytes(values: Tree, mesh: Mesh, space: str | None = None) -> int:
    """Count the bytes that one rank of a mesh holds of a tree, in any layout; tied leaves count once.

    Args:
        values: a tree of plain tensors, which count in full, and of boxes, of which one rank's shard counts. Tensors on
            the meta device count as if they had memory.
        mesh: the ranks. In a simulation boxes hold the shards of all ranks.
        space: "device" or "host" to count the bytes in one memory (`optim.offload`); by default both count.

    Raises:
        ValueError: if `space` has another value.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=4)
        >>> state_bytes({"plain": torch.zeros(100), "batch": mesh.split(torch.zeros(100))}, mesh)
        500
    """
    check_choice("space", space, ("device", "host", None))
    total = 0
    visited = set()
    for x in tree.flatten(values, is_box)[0]:
        leaves = tree.flatten(x)[0]
        pieces = zip(spaces(x), x.pieces, strict=True) if isinstance(x, Shard) else [("device", leaves)]
        # a piece may be a tree (optim.leafwise)
        memories = [memory for memory, piece in pieces for _ in tree.flatten(piece)[0]]
        for axes, leaf, memory in zip(leaf_axes(x, mesh.axis_names), leaves, memories, strict=True):
            if space not in (None, memory):
                continue
            n = math.prod([size for name, size in mesh.shape if name in axes]) if mesh.simulated else 1
            for tensor in tree.tensors(leaf):
                if id(tensor) not in visited:
                    visited.add(id(tensor))
                    total += tensor.nbytes // n
    return total


_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_host_memory(
    init: Callable[[Any], Any], step_boxes: Any, params: Any, optimizer: Optimizer, mesh: Mesh
) -> None:
    """Check that the offloaded state of all ranks of this host fits into its memory, before it is allocated.

    There is no check without offload, or for parameters on the meta device. Nor is there one if the optimizer's `init`
    fails on meta tensors, or if the system does not report its free memory.

    Args:
        init: the optimizer's `init`, as a program of all ranks.
        step_boxes: the parameters as they are within a step, on the meta device.
        params: the parameters in the step's layout.
        optimizer: the optimizer.
        mesh: the ranks.

    Raises:
        MemoryError: if the state does not fit. The message names both sizes.
    """
    if not optimizer.offloads_state or any(x.is_meta for x in tree.tensors(params)):
        return
    free = _free_bytes()
    if free is None:
        return
    try:
        trees = [init(step_boxes)]
    except (NotImplementedError, RuntimeError):  # the optimizer reads values
        return
    if optimizer.param_offload_ratio:
        meta = tree.map(lambda x: torch.empty_like(x, device="meta"), params)
        trees.append(optimizer.cast_and_offload(meta))
    ranks = mesh.size if mesh.simulated else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed_bytes = ranks * state_bytes(trees, mesh, "host")
    if needed_bytes > free:
        raise MemoryError(
            f"offload: this host needs {format_bytes(needed_bytes)} for its {ranks} ranks, and {format_bytes(free)} of "
            f"its memory are free, {free / needed_bytes:.0%} of the need: use a smaller ratio, or fewer ranks on a host"
        )


def _free_bytes() -> int | None:
    """Return the bytes of host memory that this process's control group may still allocate; None if unknown."""
    if not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP / "memory.max"
    if limit.exists() and (maximum := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # without the file cache, which can be freed
        used_bytes = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        free = min(free, int(maximum) - used_bytes)
    return free
