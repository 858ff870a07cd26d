"""Linear layers, embeddings and the cross entropy of which each rank along an axis holds a part."""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from fzero._torch.levels import may_differ
from fzero.axes import axis_index, axis_size, lookup, where_bound
from fzero.parallel.tensor._boundaries import along, enter, join, leave

__all__ = ["column", "cross_entropy", "embed", "own_rows", "row"]

# Linear layers and embeddings of which each rank along an axis has a part.


def column(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None = None,
    axis: str = "tp",
    *,
    gather: bool = False,
    sequence: bool = False,
) -> torch.Tensor:
    """Multiply by a matrix of which each rank has some columns: `x @ w + b`, of all of which a rank has its own part.

    Split `w` and `b` by their last dimension, or heads of attention by theirs: `tp.split({"qkv": 2})` for
    `[d, 3, heads, width of a head]`. Where the axis is not bound this is the whole product.

    Args:
        x: `[.., d]`, replicated; with `sequence` `[.., t / n, d]`, this rank's part of the tokens.
        w: `[d, f / n]`, this rank's columns; or with more dimensions `[d, ..]`, of which one is cut.
        b: `[f / n]`, of the shape of w without d; None for none.
        axis: the name of the axis.
        gather: whether the ranks' columns are joined, along the last dimension. It saves no memory; a loss needs it
            not (`tp.cross_entropy`).
        sequence: whether x is cut along the sequence (see `tp.enter`).

    Returns:
        `[.., f / n]`, which differs by rank; with `gather` `[.., f]`, replicated.

    Raises:
        ValueError: in a simulation, if `w` is equal on all ranks, or x differs by rank.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.column(torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    check_part("column", w, axis)
    y = _product(enter(x, axis, sequence=sequence), w, 1, b)
    return join(y, axis, dim=-1) if gather else y


def row(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, axis: str = "tp", *, sequence: bool = False
) -> torch.Tensor:
    """Multiply by a matrix of which each rank has some rows, and sum over the ranks: `x @ w + b`.

    Split `w` by its first dimension, and not `b`, which is added once. Where the axis is not bound this is the whole
    product.

    Args:
        x: `[.., f / n]`, as `column` returns it.
        w: `[f / n, d]`, the rows of the same features; or with more dimensions `[.., d]`, as many of x as it has but d.
        b: `[d]`, replicated; None for none.
        axis: the name of the axis.
        sequence: whether each rank is to have a part of the tokens of the result (see `tp.leave`).

    Returns:
        `[.., d]`, replicated; with `sequence` `[.., t / n, d]`, this rank's part of the tokens.

    Raises:
        ValueError: in a simulation, if `w` is equal on all ranks; with `sequence`, if the tokens do not divide by n.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> x, up, down = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 3)
        >>> tp.row(torch.tanh(tp.column(x, up)), down).shape
        torch.Size([2, 3])
    """
    check_part("row", w, axis)
    y = leave(_product(x, w, w.ndim - 1, None), axis, sequence=sequence)
    if b is None:
        return y
    return y + (enter(b, axis) if sequence else b)


def _product(x: torch.Tensor, w: torch.Tensor, dims: int, b: torch.Tensor | None) -> torch.Tensor:
    """Contract the last `dims` dimensions of x with the first ones of w, and add b."""
    if w.ndim == 2:
        return F.linear(x, w.mT, b)
    y = torch.tensordot(x, w, dims)
    return y if b is None else y + b


def embed(tokens: torch.Tensor, table: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Look tokens up in a table of which each rank has some rows: a part of the vocabulary.

    Split `table` by its first dimension. A rank looks up what it has, and the sum over the ranks has each token's row.

    Args:
        tokens: int64 `[..]`, numbers below n v, replicated.
        table: `[v, d]`, this rank's rows.
        axis: the name of the axis. Where none of that name is bound the table is whole.
        sequence: whether each rank is to have a part of the tokens of the result (see `tp.leave`).

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
    if not where_bound(axis):
        return F.embedding(tokens, table)
    check_part("embed", table, axis)
    local, mine, fill = own_rows(tokens, table, axis)
    return leave(torch.where(mine, F.embedding(local, table), fill), axis, sequence=sequence)


def own_rows(tokens: torch.Tensor, table: torch.Tensor, axis: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the rows of a table `[v, d]` that this rank has.

    Returns:
        `(local, mine, fill)`: the number of each token's row in this rank's table, whether it has that row, and the
        value in its place if not. That is zero, or nan for a token that no rank has. The latter two are `[.., 1]`.
    """
    v, n = len(table), axis_size(where_bound(axis))
    local = tokens - axis_index(axis).to(tokens.device) * v
    known = ((tokens >= 0) & (tokens < v * n)).unsqueeze(-1)
    fill = torch.where(known, torch.zeros((), dtype=table.dtype, device=table.device), math.nan)
    return local.clamp(0, v - 1), ((local >= 0) & (local < v)).unsqueeze(-1), fill


def check_part(name: str, w: torch.Tensor, axis: str) -> None:
    """Check that ranks have different parts of a weight, as far as types tell: a simulation knows what is equal.

    Raises:
        ValueError: if all have the same.
    """
    n = axis_size(where_bound(axis))
    if n > 1 and not may_differ(w, lookup(axis).token):
        raise ValueError(
            f"tp.{name}: the weight {list(w.shape)} is equal on the {n} ranks along {axis!r}, and each is to have its "
            f"own part: split it, fzero.shard(split=fzero.parallel.tensor.split({{name: dimension}}, axis={axis!r}))"
        )


# Cross entropy of logits of which each rank has those of a part of the vocabulary.


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: str = "tp",
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the cross entropy of logits whose classes lie on the ranks along an axis, and gather none of them.

    What travels is a maximum and two sums for each token. Exact: the numbers of `torch.nn.functional.cross_entropy` of
    the whole logits, up to the order of sums; and these, where the axis is not bound.

    Args:
        logits: `[.., v / n]`, this rank's classes, as `tp.column` returns them. Half precision is computed, and
            returned, in float32.
        targets: int64 `[..]`: numbers below v.
        axis: the name of the axis.
        ignore_index: the target that adds nothing, and counts for nothing.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the share of a uniform distribution in the targets, from 0 to 1.

    Returns:
        A 0-d tensor, or `[..]` with "none"; replicated. It is nan where a target is no class.

    Raises:
        ValueError: if the shapes do not fit, or `reduction` or `label_smoothing` is none of its values.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> logits, targets = torch.randn(5, 7), torch.tensor([0, 6, 3, -100, 1])
        >>> expected = torch.nn.functional.cross_entropy(logits, targets)
        >>> torch.allclose(tp.cross_entropy(logits, targets), expected)
        True

    References:
        Shoeybi et al.: Megatron-LM, arXiv:1909.08053, section 3.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r}: expected "mean", "sum" or "none"')
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1")
    if not logits.ndim or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets have the shape {list(targets.shape)}, and logits {list(logits.shape)}: expected a target for "
            "each row of logits"
        )
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    v = x.shape[-1] * axis_size(where_bound(axis))
    total, picked, mean = _sums(x, targets, axis, label_smoothing > 0)
    nll = total - picked
    if mean is not None:
        nll = (1 - label_smoothing) * nll + label_smoothing * (total - mean / v)
    ignored = targets == ignore_index
    nll = torch.where(ignored | (targets >= 0) & (targets < v), nll, math.nan)
    nll = torch.where(ignored, 0.0, nll)
    if reduction == "none":
        return nll
    return nll.sum() if reduction == "sum" else nll.sum() / (~ignored).sum()


def _sums(
    x: torch.Tensor, targets: torch.Tensor, axis: str, smooth: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return for each row of logits `[.., k]` the logarithm of the sum of exponentials, the target's logit, the sum."""
    k, bound = x.shape[-1], where_bound(axis)
    # a constant: the result does not depend on it
    top = along("all_gather", x.detach().amax(-1, keepdim=True), axis, -1).amax(-1)
    x = x - top.unsqueeze(-1)
    local = targets - axis_index(bound).to(targets.device) * k
    picked = x.gather(-1, local.clamp(0, k - 1).unsqueeze(-1)).squeeze(-1)
    picked = torch.where((local >= 0) & (local < k), picked, 0.0)
    sums = leave(torch.stack([x.exp().sum(-1), picked, *([x.sum(-1)] if smooth else [])]), axis)
    return sums[0].log(), sums[1], sums[2] if smooth else None
