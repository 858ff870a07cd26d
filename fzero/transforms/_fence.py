"""Fences between units: all ranks reduce gradients in one order, each unit exactly once.

Eager autograd skips the reduce_scatter of a unit that the loss did not use, and runs the other reduce_scatters in the
order in which the loss used the units. If the ranks' data take different branches (an expert that only one rank
chose), the ranks would call different collectives: a hang, or gradients of the wrong unit. Fences chain the units:
the backward pass reduces them from the last in the tree to the first. So list parameters in the order of their use.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import raise_priority

__all__ = ["fence"]


class _Fence(torch.autograd.Function):
    """The identity on leaves. Its backward pass waits for the next fence, even if no leaf was used."""

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
    """Return a unit's leaves, ordered after the fence that made `anchor` (an empty tensor), and the next anchor."""
    next_anchor, *out = _Fence.apply(anchor, *leaves)  # pyright: ignore[reportGeneralTypeIssues]
    # lower than a gather's priority, so the reduce_scatter after this fence runs before the next fence opens
    raise_priority(next_anchor, levels=0)
    return tuple(out), next_anchor
