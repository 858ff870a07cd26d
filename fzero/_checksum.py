"""Compare values between the ranks of a distributed mesh: what they are, then by checksum what they hold."""

import hashlib
from typing import Any

import torch

from fzero import tree
from fzero.layout import PerRank, is_box
from fzero.mesh import Mesh

__all__ = ["check_equal"]


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """Sum the bytes of a tensor, weighted by their position, modulo 2**64: an int64 of shape []."""
    data = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).long()
    return (data * (2 * torch.arange(data.numel(), device=x.device) + 1)).sum()


def _of_all_ranks(mine: torch.Tensor, mesh: Mesh) -> list[list[int]]:
    """Exchange int64 numbers `[m]`, the same m on all ranks: each rank's, in rank order."""
    mine = mine.to(mesh.device_mesh.device_type)
    theirs = [torch.empty_like(mine) for _ in range(mesh.size)]
    torch.distributed.all_gather(theirs, mine, group=mesh.device_mesh.get_group(mesh.axis_names[0]))
    return [x.tolist() for x in theirs]


def _shown(x: Any) -> str:
    """Describe what must be the same on all ranks; of what may differ, nothing."""
    return "PerRank" if isinstance(x, PerRank) else tree.show(x)


def check_equal(what: str, values: Any, mesh: Mesh) -> None:
    """Compare a tree between the ranks: its paths in their order, how boxes are cut, numbers, and plain tensors.

    Raises:
        ValueError: on all ranks, if any differs. Names its path.
    """
    if not mesh.distributed:
        return
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    lines = [f"{tree.place(what, path)} is {_shown(x)}" for path, x in zip(paths, entries, strict=True)]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    prints = _of_all_ranks(torch.tensor([int.from_bytes(digest[:8], "big", signed=True)]), mesh)
    if any(p != prints[0] for p in prints):
        everyones: list[Any] = [None] * mesh.size
        torch.distributed.all_gather_object(everyones, lines, group=mesh.device_mesh.get_group(mesh.axis_names[0]))
        _raise_first_difference(everyones)
    tensors = [(path, x) for path, x in zip(paths, entries, strict=True) if isinstance(x, torch.Tensor)]
    if not tensors:
        return
    sums = _of_all_ranks(torch.stack([_checksum(x) for _, x in tensors]), mesh)
    for rank in range(mesh.size):
        for (path, _), a, b in zip(tensors, sums[0], sums[rank], strict=True):
            if a != b:
                raise ValueError(
                    f"{tree.place(what, path)} differs between rank 0 and rank {rank}, and a plain tensor must be "
                    "equal on all ranks: reduce it with fzero.pmean, seed every rank alike before making it, or box it "
                    "with mesh.local (in a rank program fzero.PerRank) if it is meant to differ"
                )


def _raise_first_difference(everyones: list[list[str]]) -> None:
    for rank, lines in enumerate(everyones):
        for mine, theirs in zip([*everyones[0], "no more leaves"], [*lines, "no more leaves"], strict=False):
            if mine != theirs:
                raise ValueError(
                    f"the ranks hold different trees: on rank 0 {mine}, and on rank {rank} {theirs}; build them alike, "
                    "dicts in one order"
                )
