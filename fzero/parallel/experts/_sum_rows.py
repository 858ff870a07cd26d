"""A linear map that sums rows into places. Its transpose is a map of the same kind."""

from typing import Any

import torch
from einops import einsum

from fzero._torch import allow_in_graph

__all__ = ["inverse", "sum_rows", "weighted_sum"]


class _SumRows(torch.autograd.Function):
    """y[m] = the sum over j of x[at[m, j]]. Both directions gather, since a scatter sums in a varying order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor, inverse_index: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
        return padded[index.squeeze(1)] if index.shape[1] == 1 else padded[index].sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, index, inverse_index = inputs
        ctx.save_for_backward(index, inverse_index)
        ctx.save_for_forward(index, inverse_index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        index, inverse_index = ctx.saved_tensors
        return sum_rows(grad, inverse_index, index), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *indices: Any) -> torch.Tensor:
        return sum_rows(tangent, *ctx.saved_tensors)


@allow_in_graph  # as collectives/_table.py has it
def sum_rows(x: torch.Tensor, index: torch.Tensor, inverse_index: torch.Tensor) -> torch.Tensor:
    """Sum rows into places.

    Args:
        x: rows `[n, d]`.
        index: int64 `[m, j]`: the rows that are summed into each place; n stands for no row.
        inverse_index: int64 `[n, i]`: the places into which each row goes, as `index` says; m stands for no place.

    Returns:
        `[m, d]`.
    """
    return _SumRows.apply(x, index, inverse_index)


def inverse(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return the index in `at [.., m]` of each number below `size`: int64 `[.., size]`; m if it is not there."""
    m = index.shape[-1]
    empty = torch.full((*index.shape[:-1], size + 1), m, device=index.device)
    indices = torch.arange(m, device=index.device).expand(index.shape)
    return empty.scatter(-1, index, indices)[..., :-1]


def weighted_sum(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Sum the rows `[.., k, d]` of each token's choices by its gates `[.., k]`."""
    return einsum(rows, gates.to(rows.dtype), "... k d, ... k -> ... d")
