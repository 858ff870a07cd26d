"""Rows that move: a linear map that copies rows to places, whose transpose copies them back."""

from typing import Any

import torch

from fzero._torch import allow_in_graph

__all__ = ["inverse", "moved"]


class _Moved(torch.autograd.Function):
    """y[m] = the sum over j of x[at[m, j]]. Gathers both ways: a scatter adds in any order, and so rounds at will."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
        return padded[at.squeeze(1)] if at.shape[1] == 1 else padded[at].sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, at, back = inputs
        ctx.save_for_backward(at, back)
        ctx.save_for_forward(at, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        at, back = ctx.saved_tensors
        return moved(grad, back, at), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *places: Any) -> torch.Tensor:
        return moved(tangent, *ctx.saved_tensors)


@allow_in_graph  # as collectives/table.py has it
def moved(x: torch.Tensor, at: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Sum rows into places.

    Args:
        x: rows `[n, d]`.
        at: int64 `[m, j]`: the rows that are summed into each place; n for none.
        back: int64 `[n, i]`: the places that each row goes to, as `at` has them; m for none.

    Returns:
        `[m, d]`.
    """
    return _Moved.apply(x, at, back)


def inverse(at: torch.Tensor, size: int) -> torch.Tensor:
    """Return where each of the numbers below `size` stands in `at [.., m]`: int64 `[.., size]`, m for nowhere."""
    m = at.shape[-1]
    empty = torch.full((*at.shape[:-1], size + 1), m, device=at.device)
    places = torch.arange(m, device=at.device).expand(at.shape)
    return empty.scatter(-1, at, places)[..., :-1]
