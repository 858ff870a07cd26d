"""Load balancing: losses, a bias and statistics over all ranks' tokens."""

import math
from typing import Literal

import torch

from fzero._tracebacks import api_boundary
from fzero.axes import AxisName, tokens_axis
from fzero.collectives import pmean
from fzero.parallel.experts._routing import Routing, check_routing, count_choices, describe

__all__ = ["balance_bias", "balance_loss", "expert_capacity", "expert_load", "stats", "z_loss"]


def _count_choices(routing: Routing) -> torch.Tensor:
    """Count each sequence's choices per expert: `[s, E]`."""
    check_routing(routing)
    if routing.experts.ndim != 3:
        raise ValueError(f"routing is of tokens {list(routing.experts.shape[:-1])}: expected [sequences, tokens]")
    return count_choices(routing.experts.flatten(1), routing.probs.shape[-1])[0][:, :-1]


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


def _choice_shares(routing: Routing) -> torch.Tensor:
    """Return each expert's share of each sequence's choices: `[s, E]`."""
    return _count_choices(routing).to(routing.probs.dtype) / max(routing.experts.shape[1:].numel(), 1)


@api_boundary
def expert_load(routing: Routing, axis: AxisName = None) -> torch.Tensor:
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
        >>> experts.expert_load(experts.route(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]]), k=1))
        tensor([0.7500, 0.2500])
    """
    return pmean(_choice_shares(routing).mean(0), axis)


@api_boundary
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
    share, score = _choice_shares(routing), routing.probs.mean(1)
    if over == "batch":
        share, score = pmean((share.mean(0), score.mean(0)), axis)
    elif over != "sequence":
        raise ValueError(f'over={over!r}: expected "batch" or "sequence"')
    if over == "sequence" and (tokens := tokens_axis()) is not None:
        share, score = pmean((share, score), tokens)
    return routing.probs.shape[-1] * (share * score).sum(-1).mean()


@api_boundary
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


@api_boundary
def balance_bias(bias: torch.Tensor, load: torch.Tensor, rate: float = 1e-3) -> torch.Tensor:
    """Raise the bias of experts below the mean load, and lower that of experts above it: balance without a loss.

    `bias` is the argument of `route(bias=)`. It is not a parameter: the step takes it, and returns the new one. Pass
    the load over all ranks (`experts.expert_load`), or the ranks' biases would diverge; a simulation refuses such a
    bias.

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


@api_boundary
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
    counts = _count_choices(routing)
    t, k = routing.experts.shape[-2:]
    c = expert_capacity(t, k, counts.shape[-1], capacity)
    dtype = routing.probs.dtype
    processed_share = counts.clamp(max=c).sum(-1).to(dtype).mean() / max(t * k, 1)
    probs = routing.probs.detach()
    entropy = torch.special.entr(probs / probs.sum(-1, keepdim=True)).sum(-1).mean()
    load, processed_share, entropy = pmean((_choice_shares(routing).mean(0), processed_share, entropy), axis)
    return {"load": load, "dropped": 1 - processed_share, "entropy": entropy}
