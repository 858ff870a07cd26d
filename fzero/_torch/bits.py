"""Views of a tensor's bits as numbers of another dtype, which torch 2.11 cannot batch.

`Tensor.view(dtype)` has a batching rule since torch 2.13; without torch 2.11 this file can go.
"""

from typing import Any

import torch

from fzero._torch.levels import vmaps

__all__ = ["view_bits"]

_HAS_RULE = torch.__version__ >= "2.13"


class _ViewBits(torch.autograd.Function):
    """A view of bits with a batching rule."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int | None]:
        return view_bits(x, dtype), in_dims[0]


def view_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of a tensor as numbers of another dtype of the same size, of the same shape."""
    return x.view(dtype) if _HAS_RULE or not vmaps() else _ViewBits.apply(x, dtype)
