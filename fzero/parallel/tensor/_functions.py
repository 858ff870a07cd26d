"""Linear layers and embeddings that are split over an axis, as functions."""

import math

import torch
import torch.nn.functional as F

from fzero._torch.levels import may_differ
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_index, axis_size, bound_axis
from fzero.parallel.tensor._boundaries import along, enter, leave

__all__ = ["check_part", "column", "embed", "own_rows", "row"]


@api_boundary
def column(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None = None,
    axis: str = "tp",
    *,
    gather: bool = False,
    sequence: bool = False,
) -> torch.Tensor:
    """Multiply by a matrix that is split by columns: each rank returns its own columns of `x @ w + b`.

    Split `w` and `b` along their last dimension, or along the heads of attention: `tp.split_rule({"qkv": 2})` for
    `[d, 3, heads, head width]`. If the axis is not bound, the result is the full product.

    Args:
        x: `[.., d]`, replicated; with `sequence` `[.., t / n, d]`, this rank's part of the tokens.
        w: `[d, f / n]`, this rank's columns; or `[d, ..]` with more dimensions, one of which is split.
        b: `[f / n]`, or the shape of w without d; None for no bias.
        axis: the name of the axis.
        gather: whether the ranks' columns are concatenated along the last dimension. This saves no memory, and a loss
            does not need it (`tp.cross_entropy`).
        sequence: whether x is split along the sequence (see `tp.enter`).

    Returns:
        `[.., f / n]`, which differs by rank; with `gather` `[.., f]`, replicated.

    Raises:
        ValueError: if the last dimension of x is not the first of w. In a simulation, if `w` is equal on all ranks, or
            x differs by rank without `sequence`.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.column(torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    _check_shapes("column", x, w, 1)
    check_part("fzero.parallel.tensor.column", w, axis)
    y = _contract(enter(x, axis, sequence=sequence), w, 1, b)
    return along("all_gather_invariant", y, axis, -1) if gather else y


@api_boundary
def row(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, axis: str = "tp", *, sequence: bool = False
) -> torch.Tensor:
    """Multiply by a matrix that is split by rows, and sum over the ranks: `x @ w + b`.

    Split `w` along its first dimension. Do not split `b`, which is added once. If the axis is not bound, the result is
    the full product.

    Args:
        x: `[.., f / n]`, as `column` returns it.
        w: `[f / n, d]`, the rows of the same features; or `[.., d]`, where all but d are the last dimensions of x.
        b: `[d]`, replicated; None for no bias.
        axis: the name of the axis.
        sequence: whether each rank receives only its part of the result's tokens (see `tp.leave`).

    Returns:
        `[.., d]`, replicated; with `sequence` `[.., t / n, d]`, this rank's part of the tokens.

    Raises:
        ValueError: if the last dimensions of x are not those of w but for d. In a simulation, if `w` is equal on all
            ranks; with `sequence`, if the tokens do not divide by n.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> x, up, down = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 3)
        >>> tp.row(torch.tanh(tp.column(x, up)), down).shape
        torch.Size([2, 3])
    """
    _check_shapes("row", x, w, w.ndim - 1)
    check_part("fzero.parallel.tensor.row", w, axis)
    y = leave(_contract(x, w, w.ndim - 1, None), axis, sequence=sequence)
    if b is None:
        return y
    return y + (enter(b, axis) if sequence else b)


def _check_shapes(name: str, x: torch.Tensor, w: torch.Tensor, dims: int) -> None:
    """Raise an error for a weight whose first `dims` dimensions are not the last ones of x."""
    if w.ndim < 2 or x.ndim < dims or x.shape[x.ndim - dims :] != w.shape[:dims]:
        expected = "x [.., d] and w [d, f / n]" if name == "column" else "x [.., f / n] and w [f / n, d]"
        hint = ""
        if w.ndim == 2 and x.ndim and x.shape[-1] == w.shape[1]:
            hint = "; the weight of a torch.nn.Linear is transposed, so pass weight.mT"
        raise ValueError(
            f"fzero.parallel.tensor.{name}: x is {list(x.shape)} and w {list(w.shape)}: expected {expected}{hint}"
        )


def _contract(x: torch.Tensor, w: torch.Tensor, dims: int, b: torch.Tensor | None) -> torch.Tensor:
    """Contract the last `dims` dimensions of x with the first ones of w, and add b."""
    if w.ndim == 2:
        return F.linear(x, w.mT, b)
    y = torch.tensordot(x, w, dims)
    return y if b is None else y + b


@api_boundary
def embed(tokens: torch.Tensor, table: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Look tokens up in a table whose rows are split: each rank holds part of the vocabulary.

    Split `table` along its first dimension. Each rank looks tokens up in its own rows, and the results are summed over
    the ranks.

    Args:
        tokens: int64 `[..]`, numbers below n v, replicated.
        table: `[v, d]`, this rank's rows.
        axis: the name of the axis. If no axis of this name is bound, `table` is the full table.
        sequence: whether each rank receives only its part of the result's tokens (see `tp.leave`).

    Returns:
        `[.., d]`, replicated; nan for a number outside the vocabulary. With `sequence` this rank's part of the tokens.

    Raises:
        IndexError: without the axis on a CPU, for a number outside the vocabulary.
        ValueError: in a simulation, if `table` is equal on all ranks.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> table = fzero.PerRank(torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]]))  # [2 ranks, 2 rows, 1]
        >>> fzero.mesh(tp=2).spmd(tp.embed)(torch.tensor([3, 0]), table).mT
        tensor([[3., 0.]])
    """
    if not axis_if_bound(axis):
        return F.embedding(tokens, table)
    check_part("fzero.parallel.tensor.embed", table, axis)
    local, is_local, fill = own_rows(tokens, table, axis)
    return leave(torch.where(is_local, F.embedding(local, table), fill), axis, sequence=sequence)


def own_rows(tokens: torch.Tensor, table: torch.Tensor, axis: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the rows of tokens in this rank's part `[v, d]` of a table.

    Returns:
        `(local, is_local, fill)`: the index of each token's row in this rank's table, whether the rank holds that row,
        and the value to use if it does not. This value is zero, or nan for a token that no rank holds. The latter two
        are `[.., 1]`.
    """
    v, n = len(table), axis_size(axis_if_bound(axis))
    local = tokens - axis_index(axis, device=tokens.device) * v
    is_valid = ((tokens >= 0) & (tokens < v * n)).unsqueeze(-1)
    fill = torch.where(is_valid, torch.zeros((), dtype=table.dtype, device=table.device), math.nan)
    return local.clamp(0, v - 1), ((local >= 0) & (local < v)).unsqueeze(-1), fill


def check_part(name: str, w: torch.Tensor, axis: str) -> None:
    """Check that ranks hold different parts of a weight. Only a simulation knows which tensors are equal.

    Raises:
        ValueError: if all ranks hold the same weight.
    """
    n = axis_size(axis_if_bound(axis))
    if n > 1 and not may_differ(w, bound_axis(axis).token):
        raise ValueError(
            f"{name}: the weight {list(w.shape)} is equal on the {n} ranks along {axis!r}, but each must hold its "
            "own part: split it, "
            f"fzero.shard(split=fzero.parallel.tensor.split_rule({{name: dimension}}, axis={axis!r}))"
        )
