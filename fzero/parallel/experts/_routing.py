"""Routing: each token's experts, and the weights of their outputs."""

from typing import Any, Literal, NamedTuple

import torch

from fzero import random
from fzero._arguments import check_choice, check_int, is_int
from fzero._dtypes import at_least_float32, sum_dtype
from fzero._format import format_tensor
from fzero._tracebacks import api_boundary
from fzero.axes import axis_index, loss_axes, micro_batch

__all__ = ["Routing", "check_floating", "check_routing", "count_choices", "describe", "jitter", "route"]


def describe(x: Any) -> str:
    """Describe an argument for a message: a tensor's dtype and shape, or another value."""
    return format_tensor(x.dtype, x.shape) if isinstance(x, torch.Tensor) else repr(x)


def check_floating(name: str, x: Any, expected: str) -> None:
    """Check that an argument is a floating-point tensor.

    Raises:
        TypeError: if it is not. The message names the argument and the expected shape.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} is {describe(x)}: expected a floating-point tensor {expected}")


_TINY = 1e-20  # as in DeepSeek-V3: sigmoids of logits below -104 are zero in float32


class Routing(NamedTuple):
    """A router's decision; `..` are the dimensions of the tokens, such as sequences and tokens.

    Attributes:
        experts: int64 `[.., k]`: each token's experts, the most likely first; E for no expert.
        gates: `[.., k]`: the weight of each choice.
        probs: `[.., E]`: the scores of all experts.
        logits: `[.., E]`: the logits from which the scores were computed.
    """

    experts: torch.Tensor
    gates: torch.Tensor
    probs: torch.Tensor
    logits: torch.Tensor


def check_routing(routing: Any) -> None:
    """Check that an argument is a routing.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing is {describe(routing)}: expected the result of fzero.parallel.experts.route")


@api_boundary
def route(
    logits: torch.Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    groups: tuple[int, int] | None = None,
) -> Routing:
    """Choose k experts for each token, by their scores.

    The computation is in float32, or in float64 if the logits are. A token with a nan among its logits goes to no
    expert and takes no position. One of its gates is nan, so its output is nan too, and `fzero.observe.nonfinite` finds
    the source.

    Args:
        logits: `[.., E]`, floating-point.
        k: the number of experts per token.
        score: the function from logits to scores.
        normalize: whether a token's gates are divided by their sum; gates that are all zero stay zero.
        scale: the factor by which the gates are multiplied in the end.
        bias: `[E]`, added to the scores for the choice of experts only, not in the gates; see `balance_bias`.
        groups: `(n, most)`: the experts form n equal groups, such as machines, and a token's experts lie in its `most`
            best groups. A group's score is the sum of its two best experts' scores (DeepSeek-V3).

    Returns:
        A `Routing`. Experts of equal score come in the order of torch's `topk`.

    Raises:
        TypeError: if `logits` or `bias` is not a floating-point tensor, or `scale` is not a number.
        ValueError: if k is not between 1 and the number of experts that a token may choose from, or if `score`,
            `bias` or `groups` is invalid.

    Example:
        >>> routing = route(torch.tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]]), k=2, normalize=True)
        >>> routing.experts
        tensor([[[0, 2],
                 [1, 2]]])
        >>> routing.gates
        tensor([[[0.7311, 0.2689],
                 [0.8808, 0.1192]]])

    References:
        Shazeer et al.: Outrageously large neural networks, arXiv:1701.06538.
        DeepSeek-AI: DeepSeek-V3, arXiv:2412.19437.
    """
    _check_scores(logits, score, scale, bias)
    _check_choices(logits.shape[-1], k, groups)
    logits = at_least_float32(logits)
    probs = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    scores = probs.detach() if bias is None else probs.detach() + bias.detach()
    if groups is not None:
        scores = _mask_other_groups(scores, *groups)
    experts = scores.topk(k, -1).indices
    gates = probs.gather(-1, experts)  # topk takes nan as the largest score, so the gate of such a token is nan
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True).clamp(min=_TINY)
    has_nan = probs.isnan().any(-1, keepdim=True)
    return Routing(torch.where(has_nan, logits.shape[-1], experts), gates * scale, probs, logits)


def _mask_other_groups(scores: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Set the scores of experts outside the best groups to -inf."""
    group_scores = scores.unflatten(-1, (n, scores.shape[-1] // n))
    best_two = group_scores.topk(min(2, group_scores.shape[-1]), -1).values.sum(-1)
    best = best_two.topk(k, -1).indices
    is_best = (best.unsqueeze(-1) == torch.arange(n, device=scores.device)).any(-2)
    return group_scores.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(-2)


def _check_scores(logits: Any, score: str, scale: Any, bias: Any) -> None:
    """Raise an error for logits, a score, a scale or a bias that a routing cannot have."""
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or not logits.ndim:
        raise TypeError(
            f"logits is {describe(logits)}: expected a floating-point tensor [.., experts], the router's output"
        )
    count = logits.shape[-1]
    check_choice("score", score, ("softmax", "sigmoid"))
    if not isinstance(scale, int | float | torch.Tensor):
        raise TypeError(f"scale={scale!r}: expected a number, the factor of the gates")
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        label = f"bias is {describe(bias)}" if isinstance(bias, torch.Tensor) else f"bias={bias!r}"
        raise TypeError(f"{label}: expected a floating-point tensor [{count}], one number per expert")
    if bias.shape != (count,):
        raise ValueError(
            f"bias has the shape {list(bias.shape)}: expected [{count}], one number per expert; make it with "
            f"torch.zeros({count})"
        )


def _check_choices(count: int, k: Any, groups: Any) -> None:
    choices = count
    if groups is not None:
        pair = isinstance(groups, tuple | list) and len(groups) == 2 and all(is_int(v) for v in groups)
        n, max_groups = groups if pair else (0, 0)
        if n < 1 or count % n or not 1 <= max_groups <= n:
            raise ValueError(
                f"groups={groups}: expected (n, most), where n divides the {count} experts, and most is 1 to n"
            )
        choices = count // n * max_groups
    check_int("k", k, 1, "the number of a token's experts", maximum=choices)


@api_boundary
def jitter(x: torch.Tensor, key: torch.Tensor, amount: float = 0.01) -> torch.Tensor:
    """Multiply each element by a random number from 1 - amount to 1 + amount, for a router's input in training.

    A sequence's numbers depend on the key and on its position in the global batch, but not on the mesh. With one
    micro-batch they equal those of unsharded training. Each micro-batch draws different numbers, and so does each rank
    that holds a part of the tokens of a sequence.

    Args:
        x: `[sequences, ..]`, floating-point: this rank's part of the batch.
        key: a key, the same on every rank: `fzero.random.key`.
        amount: the largest distance of the numbers from 1.

    Returns:
        A tensor like `x`.

    Raises:
        TypeError: if `key` is not a key, or `x` is not floating-point.
        ValueError: if `amount` is not between 0 and 1.

    Example:
        >>> import fzero
        >>> noisy = jitter(torch.ones(1, 2, 2), fzero.random.key(0), 0.5)
        >>> bool((noisy >= 0.5).all() and (noisy <= 1.5).all())
        True

    References:
        Fedus, Zoph, Shazeer: Switch transformers, arXiv:2101.03961.
    """
    if not 0 <= amount <= 1:
        raise ValueError(f"amount={amount}: expected a number between 0 and 1")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.ndim:
        raise TypeError(f"x is {describe(x)}: expected a floating-point tensor [sequences, ..]")
    key = random.fold_in(key, micro_batch()).to(x.device)
    first_token = axis_index(tuple([a.name for a in loss_axes()]), device=x.device) * x.shape[0]
    dtype = sum_dtype(x.dtype)

    def noise(sequence: torch.Tensor) -> torch.Tensor:
        return random.uniform(random.fold_in(key, sequence), x.shape[1:], dtype)

    samples = torch.vmap(noise)(first_token + torch.arange(x.shape[0], device=x.device))
    return (x * (1 + amount * (2 * samples - 1))).to(x.dtype)


def count_choices(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count choices `[.., q]` by expert, `[.., E + 1]`, and return where each expert's begin once they are sorted."""
    zeros = torch.zeros((*experts.shape[:-1], count + 1), dtype=torch.int64, device=experts.device)
    counts = zeros.scatter_add(-1, experts, torch.ones_like(experts))
    return counts, counts.cumsum(-1) - counts
