"""Tensor parallelism as functions: boundaries of split layers, linear layers, embeddings and the cross entropy.

At a boundary a replicated input meets split weights, or partial results meet. `enter` is Megatron's f, and `leave` its
g (arXiv:1909.08053). With `sequence` each rank holds part of the tokens between the layers: `enter` gathers them, and
`leave` scatters them (arXiv:2205.05198). If the axis is not bound, the functions of boundaries are the identity.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from fzero._arguments import check_choice
from fzero._call_hints import call_hints
from fzero._dtypes import at_least_float32
from fzero._torch.levels import may_differ
from fzero.axes import Axis, averaged_axes, axis_if_bound, axis_index, axis_size, bound_axis
from fzero.collectives import DimOptions, NoOptions, apply_along, check_dim

__all__ = [
    "all_gather",
    "along",
    "check_loss_options",
    "check_part",
    "column",
    "cross_entropy",
    "embed",
    "enter",
    "leave",
    "logits_of",
    "loss_of_sums",
    "own_rows",
    "row",
    "scatter",
]

_SEQUENCE = -2  # the dimension of tokens: [.., tokens, width]


def along(name: str, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Apply a collective that splits or joins a tensor along a dimension, over the axis if it is bound."""
    return apply_along(name, x, _bound(axis), DimOptions(check_dim(name, x, dim) - x.ndim))


def _bound(axis: str) -> list[Axis]:
    """Return the axis if it is bound, after a check that its ranks share one loss.

    Raises:
        ValueError: if the step averages over the axis: gradients of split leaves would be n times too small.
    """
    averaged = averaged_axes()
    if axis in averaged and axis_size(axis) > 1:
        rest = tuple([name for name in averaged if name != axis])
        expected = f"axis={rest}" if rest else f"axis='dp' of fzero.mesh(dp=1, {axis}={axis_size(axis)})"
        raise ValueError(
            f"axis={axis!r}: its ranks compute one loss together, but the step averages over it, "
            f"fzero.shard(axis={averaged}): name only the data-parallel axes, {expected}"
        )
    return [bound_axis(bound) for bound in axis_if_bound(axis)]


@call_hints
def enter(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Bring a replicated value into a layer that is split over an axis.

    Call it once for several products with one value, since each call costs a sum or a gather of its own. A replicated
    weight that is applied to parts must enter too, such as the weight of a norm on parts of the sequence.

    Args:
        x: a replicated tensor; with `sequence` this rank's part `[.., t / n, d]` of the tokens.
        axis: the name of the axis. If no axis of this name is bound, `enter` is the identity.
        sequence: whether x is split along the sequence.

    Returns:
        `x`; with `sequence` the gathered tokens `[.., t, d]`. The transpose sums the ranks' gradients by an all_reduce,
        or with `sequence` by a reduce_scatter.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if the step averages over the axis. In a simulation also if x differs by rank without `sequence`.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> def mlp(x, up, down):
        ...     return tp.leave(torch.tanh(tp.enter(x) @ up) @ down)
        >>> x, up, down = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 3)
        >>> parts = fzero.PerRank(torch.stack(up.chunk(2, 1))), fzero.PerRank(torch.stack(down.chunk(2, 0)))
        >>> torch.equal(fzero.mesh(tp=2).spmd(mlp)(x, *parts), mlp(x, up, down))
        True
    """
    if sequence:
        # The ranks' parts are gathered one after the other. Without this copy, each product would make and keep one.
        return along("all_gather", x, axis, _SEQUENCE).contiguous()
    return apply_along("pvary", x, _bound(axis), NoOptions())


@call_hints
def leave(x: torch.Tensor, axis: str = "tp", *, sequence: bool = False) -> torch.Tensor:
    """Sum the ranks' partial results of a layer into one value.

    Args:
        x: `[.., t, d]`, this rank's part of the sum.
        axis: the name of the axis. If no axis of this name is bound, `leave` is the identity.
        sequence: whether each rank receives only its part of the tokens.

    Returns:
        The sum, replicated; with `sequence` this rank's part `[.., t / n, d]` of it. The transpose passes on the
        gradient, which it gathers with `sequence`.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if `sequence` is set and the number of tokens does not divide by n.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> x = fzero.PerRank(torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]))  # [2 ranks, 2 tokens, 1]
        >>> fzero.mesh(tp=2).spmd(tp.leave)(x).mT
        tensor([[11., 22.]])
    """
    if sequence:
        _check_length(x, axis, _SEQUENCE)
        return along("psum_scatter", x, axis, _SEQUENCE)
    return apply_along("psum_invariant", x, _bound(axis), NoOptions())


@call_hints
def scatter(x: torch.Tensor, axis: str = "tp", *, dim: int = _SEQUENCE) -> torch.Tensor:
    """Return this rank's part `[.., k, ..]` of a replicated tensor `[.., n k, ..]`.

    The transpose gathers the ranks' gradients.

    Args:
        x: a replicated tensor.
        axis: the name of the axis. If no axis of this name is bound, `scatter` is the identity.
        dim: the dimension of size n k; by default the last but one, that of the tokens.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if the dimension does not divide by n. In a simulation also if x differs by rank.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: fzero.PerRank(tp.scatter(x, dim=0)))(torch.arange(4)).value
        tensor([[0, 1],
                [2, 3]])
    """
    _check_length(x, axis, dim)
    return along("own_part_invariant", x, axis, dim)


@call_hints
def all_gather(x: torch.Tensor, axis: str = "tp", *, dim: int = _SEQUENCE) -> torch.Tensor:
    """Concatenate the ranks' parts `[.., k, ..]` into one value `[.., n k, ..]`: the inverse of `scatter`.

    The transpose is `scatter`, which communicates nothing.

    Args:
        x: this rank's part.
        axis: the name of the axis. If no axis of this name is bound, `all_gather` is the identity.
        dim: the dimension of size k; by default the last but one, that of the tokens.

    Raises:
        TypeError: if `axis` is not a name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> fzero.mesh(tp=2).spmd(lambda x: tp.all_gather(tp.scatter(x, dim=0), dim=0))(torch.arange(4))
        tensor([0, 1, 2, 3])
    """
    return along("all_gather_invariant", x, axis, dim)


def _check_length(x: torch.Tensor, axis: str, dim: int) -> None:
    dim, n = check_dim("fzero.parallel.tensor.scatter", x, dim), axis_size(axis_if_bound(axis))
    if x.shape[dim] % n:
        raise ValueError(
            f"dimension {dim} of a tensor {list(x.shape)} is split into {n} equal parts along {axis!r}, but "
            f"{x.shape[dim]} does not divide by {n}: pad the sequences, or change the size of the axis"
        )


# Linear layers and embeddings that are split over an axis.


@call_hints
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
        ValueError: in a simulation, if `w` is equal on all ranks, or x differs by rank without `sequence`.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.column(torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    check_part("fzero.parallel.tensor.column", w, axis)
    y = _product(enter(x, axis, sequence=sequence), w, 1, b)
    return along("all_gather_invariant", y, axis, -1) if gather else y


@call_hints
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
        ValueError: in a simulation, if `w` is equal on all ranks; with `sequence`, if the tokens do not divide by n.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> x, up, down = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 3)
        >>> tp.row(torch.tanh(tp.column(x, up)), down).shape
        torch.Size([2, 3])
    """
    check_part("fzero.parallel.tensor.row", w, axis)
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


@call_hints
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


# Cross entropy of logits whose classes are split over the ranks.


@call_hints
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: str = "tp",
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the cross entropy of logits whose classes are split over an axis, without gathering the logits.

    Only a maximum and two or three sums are communicated for each token. The result equals that of
    `torch.nn.functional.cross_entropy` for the full logits, except for the order of sums. If the axis is not bound,
    the logits are full.

    Args:
        logits: `[.., v / n]`, this rank's classes, as `tp.column` returns them. For half precision, the computation
            and the result are in float32.
        targets: int64 `[..]`: numbers below v.
        axis: the name of the axis.
        ignore_index: the target that is neither added nor counted.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the share of a uniform distribution in the targets, from 0 to 1.

    Returns:
        A 0-d tensor, or `[..]` with "none"; replicated. It is nan where a target is not a class.

    Raises:
        ValueError: if the shapes do not match, or `reduction` or `label_smoothing` is invalid.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> logits, targets = torch.randn(5, 7), torch.tensor([0, 6, 3, -100, 1])
        >>> expected = torch.nn.functional.cross_entropy(logits, targets)
        >>> torch.allclose(tp.cross_entropy(logits, targets), expected)
        True

    References:
        Shoeybi et al.: Megatron-LM, arXiv:1909.08053, section 3.
    """
    check_loss_options(reduction, label_smoothing)
    if not logits.ndim or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets have the shape {list(targets.shape)}, and logits {list(logits.shape)}: expected one target for "
            "each row of logits"
        )
    x = at_least_float32(logits)
    classes = x.shape[-1] * axis_size(axis_if_bound(axis))
    sums = _sums(x, targets, axis, label_smoothing > 0)
    return loss_of_sums(*sums, targets, classes, ignore_index, reduction, label_smoothing)


def check_loss_options(reduction: str, label_smoothing: float) -> None:
    """Check the options that losses of classes have in common.

    Raises:
        ValueError: if one is invalid.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1")


def loss_of_sums(
    log_sum: torch.Tensor,
    target: torch.Tensor,
    total: torch.Tensor | None,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    penalty: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy, from three numbers for each token.

    Args:
        log_sum: the log of the sum of the exponentials of the logits.
        target: the logit of the target.
        total: the sum of the logits; None without smoothing.
        targets: the targets.
        classes: the number of logits.
        ignore_index: as in `cross_entropy`.
        reduction: as in `cross_entropy`.
        label_smoothing: as in `cross_entropy`.
        penalty: what is added to the loss of each token that is not ignored.
    """
    nll = log_sum - target
    if total is not None:
        nll = (1 - label_smoothing) * nll + label_smoothing * (log_sum - total / classes)
    nll = torch.where((targets >= 0) & (targets < classes), nll + penalty, math.nan)
    ignored = targets == ignore_index
    nll = torch.where(ignored, 0.0, nll)
    if reduction == "none":
        return nll
    return nll.sum() if reduction == "sum" else nll.sum() / (~ignored).sum()


def logits_of(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Look up the targets' logits in `[.., k]`; 0 for a target that is not from 0 to k - 1."""
    k = logits.shape[-1]
    target_logits = logits.gather(-1, targets.clamp(0, k - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((targets >= 0) & (targets < k), target_logits, 0.0)


def _sums(
    x: torch.Tensor, targets: torch.Tensor, axis: str, smooth: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return, for each row of logits `[.., k]`: the log of the sum of exponentials, the target's logit, and the sum."""
    k, bound = x.shape[-1], axis_if_bound(axis)
    # Detached, since the result does not depend on the maximum.
    maximum = along("all_gather", x.detach().amax(-1, keepdim=True), axis, -1).amax(-1)
    x = x - maximum.unsqueeze(-1)
    local = targets - axis_index(bound, device=targets.device) * k
    sums = leave(torch.stack([x.exp().sum(-1), logits_of(local, x), *([x.sum(-1)] if smooth else [])]), axis)
    return sums[0].log(), sums[1], sums[2] if smooth else None
