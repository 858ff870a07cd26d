"""Cross entropy of logits of which each rank has those of a part of the vocabulary."""

import math
from typing import Literal

import torch

from fzero.axes.scope import axis_index, axis_size, where_bound
from fzero.tp._boundaries import along, leave

__all__ = ["cross_entropy"]


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
        >>> from fzero import tp
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
