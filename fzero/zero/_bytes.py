"""The bytes of a tree: how much of it one rank holds, and whether the host has room for it."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fzero import tree
from fzero.graph import size
from fzero.optim import offload_params
from fzero.ranks import Mesh
from fzero.sharding import Shard, axes_of, is_box, spaces

__all__ = ["check_host_memory", "free_bytes", "state_bytes"]


# state_bytes: how much of a tree one rank holds.


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


# Check that a host has room for what `step.init` is about to put into its memory.


MEMINFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_host_memory(state_of: Callable[[Any, Any], Any], params: Any, opt: Any, mesh: Mesh) -> None:
    """Check that the host's share of a state fits, for all ranks of this host, before any of it is made.

    Nothing is checked without offload, for tensors on the meta device, and for a pair that cannot make its state of
    such. A system that does not say what is free is not asked either.

    Args:
        state_of: makes the state of parameters and a pair.
        params: in the step's layout.
        opt: the pair.
        mesh: the ranks.

    Raises:
        MemoryError: if it does not fit. Says by how much.
    """
    if not getattr(opt, "offloads", False) or any(x.is_meta for x in tree.tensors(params)):
        return
    free = free_bytes()
    if free is None:
        return
    meta = tree.map(lambda x: torch.empty_like(x, device="meta"), params)
    try:
        held = [state_of(meta, opt)]
    except (NotImplementedError, RuntimeError):  # it reads values
        return
    if opt.lowers:
        held.append(
            offload_params(meta if opt.precision is None else opt.precision.cast(meta), opt.lowers, opt.precision)
        )
    ranks = mesh.size if mesh.simulated else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * state_bytes(held, mesh, "host")
    if needed > free:
        raise MemoryError(
            f"offload: {size(needed)} are to lie on this host, for its {ranks} ranks, and {size(free)} of its memory "
            f"are free, {free / needed:.0%} of that: use a smaller ratio, or fewer ranks on a host"
        )


def free_bytes() -> int | None:
    """Return how much of the host's memory this process's group may still take, or None if that is not known."""
    if not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = GROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        taken = int((GROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))  # a cache of files goes
        free = min(free, int(most) - taken)
    return free
