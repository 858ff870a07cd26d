"""Compare values between the ranks of a distributed mesh, by checksum."""

from typing import Any

import torch

from fzero import tree
from fzero.layout import is_box
from fzero.mesh import Mesh

__all__ = ["check_equal"]


def _checksum(x: torch.Tensor) -> torch.Tensor:
    """Sum the bytes of a tensor, weighted by their position, modulo 2**64: an int64 of shape []."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8).long()
    return (data * (2 * torch.arange(data.numel(), device=x.device) + 1)).sum()


def check_equal(what: str, values: Any, mesh: Mesh) -> None:
    """Compare the plain tensors of a tree between the ranks; boxes may differ.

    Raises:
        ValueError: on all ranks, if any differs. Names its path.
    """
    named = [
        (path, x)
        for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True)
        if isinstance(x, torch.Tensor)
    ]
    if not named or mesh.simulated:
        return
    mine = torch.stack([_checksum(x).to(mesh.device_mesh.device_type) for _, x in named])
    group = mesh.device_mesh.get_group(mesh.axis_names[0])
    theirs = [torch.empty_like(mine) for _ in range(mesh.size)]
    torch.distributed.all_gather(theirs, mine, group=group)
    for rank, sums in enumerate(theirs):
        for (path, _), a, b in zip(named, theirs[0].tolist(), sums.tolist(), strict=True):
            if a != b:
                raise ValueError(
                    f"{tree.place(what, path)} differs between rank 0 and rank {rank}, and a plain tensor must be "
                    "equal on all ranks: seed every rank alike before making it, reduce it with fzero.pmean, or box it "
                    "with mesh.local (in a rank program fzero.PerRank) if it is meant to differ"
                )
