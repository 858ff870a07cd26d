"""Cross entropy of logits whose classes are split over the ranks."""

import math
from typing import Literal

import torch

from fzero._arguments import check_choice
from fzero._dtypes import at_least_float32
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_index, axis_size
from fzero.parallel.tensor._boundaries import along, leave

__all__ = ["check_loss_options", "combine_sums", "cross_entropy", "take_target_logits"]


@api_boundary
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
    sums = _row_sums(x, targets, axis, label_smoothing > 0)
    return combine_sums(*sums, targets, classes, ignore_index, reduction, label_smoothing)


def check_loss_options(reduction: str, label_smoothing: float) -> None:
    """Check the options that losses of classes have in common.

    Raises:
        ValueError: if one is invalid.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing!r}: expected a number from 0 to 1")


def combine_sums(
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
    is_ignored = targets == ignore_index
    nll = torch.where(is_ignored, 0.0, nll)
    if reduction == "none":
        return nll
    return nll.sum() if reduction == "sum" else nll.sum() / (~is_ignored).sum()


def take_target_logits(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Look up the targets' logits in `[.., k]`; 0 for a target that is not from 0 to k - 1."""
    k = logits.shape[-1]
    target_logits = logits.gather(-1, targets.clamp(0, k - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((targets >= 0) & (targets < k), target_logits, 0.0)


def _row_sums(
    x: torch.Tensor, targets: torch.Tensor, axis: str, smooth: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return, for each row of logits `[.., k]`: the log of the sum of exponentials, the target's logit, and the sum."""
    k, bound = x.shape[-1], axis_if_bound(axis)
    # Detached, since the result does not depend on the maximum.
    maximum = along("all_gather", x.detach().amax(-1, keepdim=True), axis, -1).amax(-1)
    x = x - maximum.unsqueeze(-1)
    local = targets - axis_index(bound, device=targets.device) * k
    sums = leave(torch.stack([x.exp().sum(-1), take_target_logits(local, x), *([x.sum(-1)] if smooth else [])]), axis)
    return sums[0].log(), sums[1], sums[2] if smooth else None
