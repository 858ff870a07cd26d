"""linear_cross_entropy: the cross entropy of a linear head, whose logits never exist as a whole.

The classes are taken chunk by chunk. A chunk's logits become three numbers a token: the log of their sum of
exponentials, the target's logit, and their sum. `remat` computes the logits again for the backward pass. So memory
holds one chunk of logits, and each chunk of the head's gradient is written once. The gradient of the hidden states is a
sum over chunks, which is taken in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from fzero._arguments import check_int
from fzero._dtypes import at_least_float32
from fzero._torch import in_chunk
from fzero._torch.levels import in_forward_mode
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_index, axis_size
from fzero.parallel.tensor import along, check_loss_options, check_part, combine_sums, enter, leave, take_target_logits
from fzero.transforms import remat

__all__ = ["LogitMap", "LossOptions", "head_cross_entropy", "linear_cross_entropy"]

_HALF = torch.bfloat16, torch.float16
LogitMap = Callable[[torch.Tensor], torch.Tensor]  # changes logits one by one


class LossOptions(NamedTuple):
    """The options of `linear_cross_entropy`, but for those of the logits."""

    ignore_index: int
    reduction: Literal["mean", "sum", "none"]
    label_smoothing: float
    z_loss: float = 0.0
    axis: str | None = None
    chunk: int = 2048


@api_boundary
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk: int = 2048,
    axis: str | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute the cross entropy of `hidden @ weight.mT + bias`, without the whole of these logits in memory.

    The result and its gradients are those of `torch.nn.functional.cross_entropy` but for rounding. The logits of
    `chunk` classes exist at a time, in the forward and in the backward pass, which computes them again. That is a
    third more work for the head, and derivatives of any order work.

    Labels are not shifted: for a language model pass `hidden[:, :-1]` and `tokens[:, 1:]`.

    Args:
        hidden: `[.., d]`, the input of the head.
        weight: `[v, d]`, as in `torch.nn.Linear`; it may be the embedding's. With `axis` `[v / n, d]`, this rank's
            classes.
        labels: int64 `[..]`: numbers below v, or `ignore_index`.
        bias: `[v]`, or with `axis` `[v / n]`; None for none.
        chunk: the number of classes whose logits exist at a time. They take `4 * chunk` bytes a token.
        axis: the axis along which the classes are split, such as "tp"; None if `weight` is full.
        ignore_index: the label that is neither added nor counted.
        reduction: "mean" over the labels that are not ignored, "sum", or "none".
        label_smoothing: the share of a uniform distribution in the targets, from 0 to 1.
        z_loss: the factor of the square of the log of the sum of exponentials, which is added to the loss of each
            token (arXiv:2204.02311, section 5).
        softcap: replaces the logits by `softcap * tanh(logits / softcap)` (arXiv:2408.00118); None to leave them.

    Returns:
        A 0-d tensor, or `[..]` with "none"; in float32 for half precision. It is nan where a label is not a class.

    Raises:
        ValueError: if the shapes do not match, or an option is invalid.
        TypeError: if `labels` are not integers.

    Example:
        >>> hidden, weight, labels = torch.randn(5, 8), torch.randn(100, 8), torch.tensor([0, 99, 3, -100, 1])
        >>> loss = linear_cross_entropy(hidden, weight, labels, chunk=32)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.mT, labels))
        True
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r}: expected a positive number, or None")
    maps: tuple[LogitMap, ...] = () if softcap is None else (partial(_cap_logits, softcap),)
    options = LossOptions(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        axis=axis,
        chunk=chunk,
    )
    return head_cross_entropy(hidden, weight, labels, bias, maps, options)


def _cap_logits(softcap: float, logits: torch.Tensor) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap)


def head_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    maps: tuple[LogitMap, ...],
    options: LossOptions,
) -> torch.Tensor:
    """Compute `linear_cross_entropy` of logits that some functions change one by one, in their order."""
    ignore_index, reduction, label_smoothing, z_loss, axis, chunk = options
    _check_operands(hidden, weight, labels, bias)
    check_loss_options(reduction, label_smoothing)
    check_int("chunk", chunk, 1)
    bound = () if axis is None else axis_if_bound(axis)
    if axis is not None:
        check_part("linear_cross_entropy", weight, axis)
        hidden = enter(hidden, axis)
    local = labels - axis_index(bound, device=labels.device) * len(weight)
    log_sum, target, total = _chunked_sums(hidden, weight, local, bias, _ChunkOptions(chunk, label_smoothing > 0, maps))
    if axis is not None:
        log_sum, target, total = _combine_ranks(log_sum, target, total, axis)
    penalty = z_loss * log_sum.square() if z_loss else 0.0
    classes = len(weight) * axis_size(bound)
    return combine_sums(
        log_sum,
        target,
        total,
        targets=labels,
        classes=classes,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        penalty=penalty,
    )


def _check_operands(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Raise an error for shapes that do not belong together, or labels that are not ints."""
    if weight.ndim != 2 or not hidden.ndim or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has the shape {list(hidden.shape)}, and weight {list(weight.shape)}: expected [.., d] and [v, d]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has the shape {list(bias.shape)}: expected [{len(weight)}], one number for each class")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels have the shape {list(labels.shape)}, and hidden {list(hidden.shape)}: expected one label for each "
            "row of hidden; for the next token pass hidden[:, :-1] and tokens[:, 1:]"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"labels are {labels.dtype}: expected int64, the number of a class for each token; labels.long() makes it"
        )


class _TokenSums(NamedTuple):
    """The three numbers of each token `[..]`, which its logits become."""

    log_sum_exp: torch.Tensor
    target_logit: torch.Tensor
    logit_sum: torch.Tensor | None


class _ChunkOptions(NamedTuple):
    """How classes are taken chunk by chunk.

    Attributes:
        chunk: the number of classes in a chunk.
        smooth: whether label smoothing needs the sum of the logits.
        maps: functions that change the logits.
    """

    chunk: int
    smooth: bool
    maps: tuple[LogitMap, ...]


def _chunked_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    options: _ChunkOptions,
) -> _TokenSums:
    """Return for each token the log of the sum of exponentials, the target's logit (0 elsewhere), and the sum."""
    run: Callable[..., torch.Tensor] = remat(_chunk_sums)
    # split, not slices: the gradients of the parts are concatenated once
    weights = weight.split(options.chunk)
    wide_hidden = None
    # a forward-mode derivative has no sum, and takes no tangents of values without memory
    if hidden.dtype in _HALF and not torch.compiler.is_dynamo_compiling() and not in_forward_mode():
        hidden, wide_hidden = hidden.detach(), _WideGradient.apply(hidden)
    biases = [None] * len(weights) if bias is None else bias.split(options.chunk)
    chunks = enumerate(zip(weights, biases, strict=True))
    sums = torch.stack([run(hidden, wide_hidden, w, b, labels, i, options) for i, (w, b) in chunks])
    return _TokenSums(sums[:, 0].logsumexp(0), sums[:, 1].sum(0), sums[:, 2].sum(0) if options.smooth else None)


class _WideGradient(torch.autograd.Function):
    """Zeros `[..]` in float32 that take no memory: added to a value, they bring it gradients that are summed there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros((), dtype=torch.float32).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


def _chunk_sums(
    hidden: torch.Tensor,
    wide: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    index: int,
    options: _ChunkOptions,
) -> torch.Tensor:
    """Return the share of one chunk's classes in each token's sums, `[2 or 3, ..]`."""
    with in_chunk(index):
        hidden = hidden if wide is None else (hidden + wide).to(hidden.dtype)
        logits = at_least_float32(F.linear(hidden, weight, bias))
        for change in options.maps:
            logits = change(logits)
        target = take_target_logits(labels - index * options.chunk, logits)
        return torch.stack([logits.logsumexp(-1), target, *([logits.sum(-1)] if options.smooth else [])])


def _combine_ranks(log_sum: torch.Tensor, target: torch.Tensor, total: torch.Tensor | None, axis: str) -> _TokenSums:
    """Combine the numbers of the ranks, each of which holds part of the classes."""
    # Detached, since the result does not depend on the maximum.
    maximum = along("all_gather", log_sum.detach().unsqueeze(-1), axis, -1).amax(-1)
    rest = [] if total is None else [total]
    sums = leave(torch.stack([(log_sum - maximum).exp(), target, *rest]), axis)
    return _TokenSums(sums[0].log() + maximum, sums[1], None if total is None else sums[2])
