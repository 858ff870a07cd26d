"""Routing: each token's experts and the weights of their outputs; and load balancing: losses, a bias and statistics."""

import math
from typing import Any, Literal, NamedTuple

import torch

from fzero import random
from fzero._arguments import check_choice, check_int, is_int
from fzero._dtypes import at_least_float32, sum_dtype
from fzero.axes import AxisName, axis_index, loss_axes, micro_batch, tokens_axis
from fzero.collectives import pmean

__all__ = [
    "Routing",
    "balance_bias",
    "balance_loss",
    "check_floating",
    "check_routing",
    "count_choices",
    "describe",
    "expert_capacity",
    "jitter",
    "load",
    "route",
    "stats",
    "z_loss",
]

# Checks of arguments.


def describe(x: Any) -> str:
    """Describe an argument for a message: a tensor's dtype and shape, or another value."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def check_floating(name: str, x: Any, expected: str) -> None:
    """Check that an argument is a floating-point tensor.

    Raises:
        TypeError: if it is not. The message names the argument and the expected shape.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} is {describe(x)}: expected a floating-point tensor {expected}")


# Routing: each token's experts, and the weights of their outputs.


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
        scores = _in_best_groups(scores, *groups)
    experts = scores.topk(k, -1).indices
    gates = probs.gather(-1, experts)  # topk takes nan as the largest score, so the gate of such a token is nan
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True).clamp(min=_TINY)
    has_nan = probs.isnan().any(-1, keepdim=True)
    return Routing(torch.where(has_nan, logits.shape[-1], experts), gates * scale, probs, logits)


def _in_best_groups(scores: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Set the scores of experts outside the best groups to -inf."""
    group_scores = scores.unflatten(-1, (n, scores.shape[-1] // n))
    best_two = group_scores.topk(min(2, group_scores.shape[-1]), -1).values.sum(-1)
    best = best_two.topk(k, -1).indices
    is_best = (best.unsqueeze(-1) == torch.arange(n, device=scores.device)).any(-2)
    return group_scores.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(-2)


def _check_scores(logits: Any, score: str, scale: Any, bias: Any) -> None:
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
        n, most = groups if pair else (0, 0)
        if n < 1 or count % n or not 1 <= most <= n:
            raise ValueError(
                f"groups={groups}: expected (n, most), where n divides the {count} experts, and most is 1 to n"
            )
        choices = count // n * most
    check_int("k", k, 1, "the number of a token's experts", maximum=choices)


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
    first = axis_index(tuple([a.name for a in loss_axes()]), device=x.device) * x.shape[0]
    dtype = sum_dtype(x.dtype)

    def noise(sequence: torch.Tensor) -> torch.Tensor:
        return random.uniform(random.fold_in(key, sequence), x.shape[1:], dtype)

    samples = torch.vmap(noise)(first + torch.arange(x.shape[0], device=x.device))
    return (x * (1 + amount * (2 * samples - 1))).to(x.dtype)


# Load balancing: losses, a bias and statistics over all ranks' tokens.


def _counts(routing: Routing) -> torch.Tensor:
    """Count each sequence's choices per expert: `[s, E]`."""
    check_routing(routing)
    if routing.experts.ndim != 3:
        raise ValueError(f"routing is of tokens {list(routing.experts.shape[:-1])}: expected [sequences, tokens]")
    return count_choices(routing.experts.flatten(1), routing.probs.shape[-1])[0][:, :-1]


def count_choices(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count choices `[.., q]` by expert, `[.., E + 1]`, and return where each expert's begin once they are sorted."""
    zeros = torch.zeros((*experts.shape[:-1], count + 1), dtype=torch.int64, device=experts.device)
    counts = zeros.scatter_add(-1, experts, torch.ones_like(experts))
    return counts, counts.cumsum(-1) - counts


def expert_capacity(tokens: int, k: int, count: int, capacity: float | None) -> int:
    """Return an expert's capacity: its number of positions per sequence.

    Raises:
        ValueError: if `capacity` is not positive and finite.
    """
    if capacity is None:
        return tokens
    if not isinstance(capacity, int | float) or isinstance(capacity, bool) or not 0 < capacity < math.inf:
        raise ValueError(
            f"capacity={capacity!r}: expected a number above 0, such as 1.25, a multiple of what even routing needs; "
            "or None, which drops no token"
        )
    # rounded first: 1.1 x 100 / 10 is 11.000000000000002 in binary, and must give 11
    return min(tokens, max(1, math.ceil(round(capacity * tokens * k / count, 9))))


def _shares(routing: Routing) -> torch.Tensor:
    """Return each expert's share of each sequence's choices: `[s, E]`."""
    return _counts(routing).to(routing.probs.dtype) / max(routing.experts.shape[1:].numel(), 1)


def load(routing: Routing, axis: AxisName = None) -> torch.Tensor:
    """Return each expert's share of all choices, over all ranks.

    Args:
        routing: the routing of sequences `[s, t]`.
        axis: the data-parallel axes; `None` for those of the running step.

    Returns:
        `[E]`, equal on all ranks. It sums to 1, minus the share of choices of no expert.

    Raises:
        ValueError: if the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts
        >>> experts.load(experts.route(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]]), k=1))
        tensor([0.7500, 0.2500])
    """
    return pmean(_shares(routing).mean(0), axis)


def balance_loss(routing: Routing, over: Literal["batch", "sequence"] = "batch", axis: AxisName = None) -> torch.Tensor:
    """Return E times the sum over experts of (share of the choices) x (mean score): 1 if routing is even.

    Over the batch, both factors are first averaged over all ranks, so the result is the loss of the global batch. With
    micro-batches it is the average of the micro-batches' losses. This is another loss, since a product of means is not
    a mean of products. Over each sequence, it is the mean of the sequences' own losses, however the batch is split:
    also where `fzero.parallel.context.split` splits the tokens of each.

    Args:
        routing: the routing of sequences `[s, t]`.
        over: the tokens over which to balance: those of the global batch, or of each sequence.
        axis: the data-parallel axes; `None` for those of the running step.

    Returns:
        A 0-d tensor. Over the batch it is equal on all ranks; over sequences it is the mean over this rank's own.

    Raises:
        ValueError: if `over` is invalid, or the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts
        >>> experts.balance_loss(experts.route(torch.zeros(1, 4, 2), k=2))
        tensor(1.)

    References:
        Fedus, Zoph, Shazeer: Switch transformers, arXiv:2101.03961. DeepSeek-AI: DeepSeek-V3, arXiv:2412.19437.
    """
    share, score = _shares(routing), routing.probs.mean(1)
    if over == "batch":
        share, score = pmean((share.mean(0), score.mean(0)), axis)
    elif over != "sequence":
        raise ValueError(f'over={over!r}: expected "batch" or "sequence"')
    if over == "sequence" and (tokens := tokens_axis()) is not None:
        share, score = pmean((share, score), tokens)
    return routing.probs.shape[-1] * (share * score).sum(-1).mean()


def z_loss(routing: Routing) -> torch.Tensor:
    """Return the mean square of the log-sum-exp of each token's logits; as a loss it keeps logits small.

    Args:
        routing: the routing of any tokens.

    Returns:
        A 0-d tensor, over this rank's own tokens.

    Example:
        >>> from fzero.parallel import experts
        >>> experts.z_loss(experts.route(torch.zeros(1, 4, 2), k=1))  # log(2) squared
        tensor(0.4805)

    References:
        Zoph et al.: ST-MoE, arXiv:2202.08906.
    """
    check_routing(routing)
    return routing.logits.logsumexp(-1).square().mean()


def balance_bias(bias: torch.Tensor, load: torch.Tensor, rate: float = 1e-3) -> torch.Tensor:
    """Raise the bias of experts below the mean load, and lower that of experts above it: balance without a loss.

    `bias` is the argument of `route(bias=)`. It is not a parameter: the step takes it, and returns the new one. Pass
    the load over all ranks (`experts.load`), or the ranks' biases would diverge; a simulation refuses such a bias.

    Args:
        bias: `[E]`.
        load: `[E]`, or several loads `[.., E]`, such as those of micro-batches.
        rate: the amount that is added or subtracted.

    Returns:
        `[E]`.

    Raises:
        TypeError: if either is not a tensor.
        ValueError: if the shapes do not match.

    Example:
        >>> balance_bias(torch.zeros(3), torch.tensor([0.5, 0.2, 0.3]), rate=0.1)
        tensor([-0.1000,  0.1000,  0.1000])

    References:
        Wang et al.: Auxiliary-loss-free load balancing, arXiv:2408.15664.
    """
    for name, x in (("bias", bias), ("load", load)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {describe(x)}: expected a tensor, one number per expert")
    if bias.ndim != 1 or load.shape[-1:] != bias.shape:
        raise ValueError(
            f"bias has the shape {list(bias.shape)}, and load {list(load.shape)}: expected [E] and [.., E]"
        )
    mean = load.detach().reshape(-1, len(bias)).mean(0)
    return bias + rate * torch.sign(mean.mean() - mean).to(bias.dtype)


def stats(routing: Routing, capacity: float | None = None, axis: AxisName = None) -> dict[str, torch.Tensor]:
    """Return statistics of a layer of experts, over all ranks.

    Args:
        routing: the routing of sequences `[s, t]`.
        capacity: the layer's capacity.
        axis: the data-parallel axes; `None` for those of the running step.

    Returns:
        `load` `[E]`: each expert's share of the choices. `dropped`: the share of choices that were dropped or had no
        expert. `entropy`: the entropy of a token's scores in nats, at most log(E). All are equal on all ranks, and
        have no gradients.

    Raises:
        ValueError: if `capacity` is not positive, or the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts
        >>> routing = experts.route(torch.tensor([[[5.0, 0.0], [5.0, 0.0], [5.0, 0.0], [0.0, 5.0]]]), k=1)
        >>> experts.stats(routing, capacity=1.0)
        {'load': tensor([0.7500, 0.2500]), 'dropped': tensor(0.2500), 'entropy': tensor(0.0402)}
    """
    counts = _counts(routing)
    t, k = routing.experts.shape[-2:]
    c = expert_capacity(t, k, counts.shape[-1], capacity)
    dtype = routing.probs.dtype
    processed = counts.clamp(max=c).sum(-1).to(dtype).mean() / max(t * k, 1)
    probs = routing.probs.detach()
    entropy = torch.special.entr(probs / probs.sum(-1, keepdim=True)).sum(-1).mean()
    load, processed, entropy = pmean((_shares(routing).mean(0), processed, entropy), axis)
    return {"load": load, "dropped": 1 - processed, "entropy": entropy}
