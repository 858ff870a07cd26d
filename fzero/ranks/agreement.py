"""Compare values between the ranks of a distributed mesh: what they are, then by checksum what they hold."""

import hashlib
from typing import Any

import torch

from fzero import tree
from fzero.layout.boxes import PerRank, axes_of, is_box
from fzero.ranks.mesh import Mesh

__all__ = ["check_equal", "checksum"]


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Sum the bytes of a tensor, weighted by their position, modulo 2**64: an int64 of shape []."""
    data = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).long()
    return (data * (2 * torch.arange(data.numel(), device=x.device) + 1)).sum()


def _of_all_ranks(mine: torch.Tensor, mesh: Mesh) -> list[list[int]]:
    """Exchange int64 numbers `[m]`, the same m on all ranks: each rank's, in rank order."""
    mine = mine.to(mesh.device_mesh.device_type)
    theirs = [torch.empty_like(mine) for _ in range(mesh.size)]
    torch.distributed.all_gather(theirs, mine)  # a mesh is the world
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
        torch.distributed.all_gather_object(everyones, lines)
        _raise_first_difference(everyones)
    leaves, varies = tree.flatten(values)[0], axes_of(values, mesh.axis_names)
    paths = tree.flatten_with_paths(values)[0]
    tensors = [
        (path, x, axes)
        for path, x, axes in zip(paths, leaves, varies, strict=True)
        if isinstance(x, torch.Tensor) and axes != mesh.axis_names
    ]
    if not tensors:
        return
    sums = _of_all_ranks(torch.stack([checksum(x) for _, x, _ in tensors]), mesh)
    for i, (path, _, axes) in enumerate(tensors):
        first: dict[tuple[int, ...], int] = {}  # place along the axes that it differs along -> a rank there
        for rank in range(mesh.size):
            places = zip(mesh.coordinates(rank), mesh.axis_names, strict=True)
            other = first.setdefault(tuple([place for place, name in places if name in axes]), rank)
            if sums[other][i] != sums[rank][i]:
                raise ValueError(_message(tree.place(what, path), other, rank, axes))


def _message(where: str, one: int, other: int, axes: tuple[str, ...]) -> str:
    if axes:
        return (
            f"{where} differs between rank {one} and rank {other}, and its box says that it differs along "
            f"{', '.join(axes)} only: give the ranks of the other axes one value"
        )
    return (
        f"{where} differs between rank {one} and rank {other}, and a plain tensor must be "
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
