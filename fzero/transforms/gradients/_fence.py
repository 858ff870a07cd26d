"""A fence between units: gradients are reduced in one order on all ranks, each unit exactly once.

Eager autograd never runs the reduce_scatter of a unit that the loss did not use, and runs the others in the order
in which the loss happened to use them. Ranks whose data take different branches (an expert that only one of them
chose) would then meet in different collectives: a hang, or gradients of the wrong unit. Fences chain the units, in
the backward pass from the last of the tree to the first, so list parameters in the order of their use.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import raise_priority

__all__ = ["fence"]


class _Fence(torch.autograd.Function):
    """The identity on leaves; its backward waits for the fence after it, even if no leaf was used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(anchor: torch.Tensor, *leaves: torch.Tensor) -> Any:
        return (anchor.new_zeros(0), *[x.view_as(x) for x in leaves])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents


def fence(leaves: Sequence[torch.Tensor], anchor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Pass a unit's leaves on, ordered after the fence that made `anchor` (an empty tensor), and give the next."""
    following, *out = _Fence.apply(anchor, *leaves)  # pyright: ignore[reportGeneralTypeIssues]
    # below a gather's own priority: the reduce_scatter after this fence runs before the next fence opens
    raise_priority(following, by=0)
    return tuple(out), following
