"""Balance: losses, a bias and statistics, of all ranks' tokens."""

from typing import Literal

import torch

from fzero.axes import AxisName
from fzero.collectives import pmean
from fzero.parallel.experts._dispatch import counted, seats_of_an_expert
from fzero.parallel.experts._route import Routing, check_routing, given

__all__ = ["balance_bias", "balance_loss", "load", "stats", "z_loss"]


def _counts(routing: Routing) -> torch.Tensor:
    """Count each sequence's choices of each expert: `[s, E]`."""
    check_routing(routing)
    if routing.experts.ndim != 3:
        raise ValueError(f"routing is of tokens {list(routing.experts.shape[:-1])}: expected [sequences, tokens]")
    return counted(routing.experts.flatten(1), routing.probs.shape[-1])[0][:, :-1]


def _shares(routing: Routing) -> torch.Tensor:
    """Return the share of each sequence's choices that each expert got: `[s, E]`."""
    return _counts(routing).to(routing.probs.dtype) / max(routing.experts.shape[1:].numel(), 1)


def load(routing: Routing, axis: AxisName = None) -> torch.Tensor:
    """Return the share of the choices that each expert got, over all ranks.

    Args:
        routing: of sequences `[s, t]`.
        axis: the axes of the data; `None` for those of the running step.

    Returns:
        `[E]`, equal on all ranks; it sums to 1, less what went nowhere.

    Raises:
        ValueError: if the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> moe.load(moe.route(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]]), k=1))
        tensor([0.7500, 0.2500])
    """
    return pmean(_shares(routing).mean(0), axis)


def balance_loss(routing: Routing, over: Literal["batch", "sequence"] = "batch", axis: AxisName = None) -> torch.Tensor:
    """Return E times the sum over experts of (share of the choices) x (mean score): 1 if routing is even.

    Over the batch, both factors are averaged over all ranks first, so that it is the loss of the global batch. A
    product of means is no mean of products: with micro-batches it is that of each micro-batch, averaged, which is
    another loss. Over each sequence, it is the mean of the sequences' own losses, whatever the cut.

    Args:
        routing: of sequences `[s, t]`.
        over: what is to be balanced: the global batch, or each sequence.
        axis: the axes of the data; `None` for those of the running step.

    Returns:
        A number. Over the batch it is equal on all ranks; over sequences it is the mean over this rank's own.

    Raises:
        ValueError: if `over` is neither, or the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> moe.balance_loss(moe.route(torch.zeros(1, 4, 2), k=2))
        tensor(1.)

    References:
        Fedus, Zoph, Shazeer: Switch transformers, arXiv:2101.03961. DeepSeek-AI: DeepSeek-V3, arXiv:2412.19437.
    """
    share, score = _shares(routing), routing.probs.mean(1)
    if over == "batch":
        share, score = pmean((share.mean(0), score.mean(0)), axis)
    elif over != "sequence":
        raise ValueError(f'over={over!r}: expected "batch" or "sequence"')
    return routing.probs.shape[-1] * (share * score).sum(-1).mean()


def z_loss(routing: Routing) -> torch.Tensor:
    """Return the mean square of the log of the sum of the exponentials of a token's logits: it keeps them small.

    Args:
        routing: of any tokens.

    Returns:
        A number, of this rank's own tokens.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> moe.z_loss(moe.route(torch.zeros(1, 4, 2), k=1))  # log(2) squared
        tensor(0.4805)

    References:
        Zoph et al.: ST-MoE, arXiv:2202.08906.
    """
    check_routing(routing)
    return routing.logits.logsumexp(-1).square().mean()


def balance_bias(bias: torch.Tensor, load: torch.Tensor, rate: float = 1e-3) -> torch.Tensor:
    """Make experts with less than their share likelier, and those with more less likely: balance without a loss.

    `bias` is what `route(bias=)` takes. It is no parameter: the step takes it and returns the new one. Give it the load
    of all ranks (`moe.load`), or ranks would go apart; a simulation finds that by type.

    Args:
        bias: `[E]`.
        load: `[E]`, or several such, `[.., E]`, as of micro-batches.
        rate: what is added or subtracted.

    Returns:
        `[E]`.

    Raises:
        TypeError: if either is no tensor.
        ValueError: if the shapes do not fit.

    Example:
        >>> balance_bias(torch.zeros(3), torch.tensor([0.5, 0.2, 0.3]), rate=0.1)
        tensor([-0.1000,  0.1000,  0.1000])

    References:
        Wang et al.: Auxiliary-loss-free load balancing, arXiv:2408.15664.
    """
    for name, x in (("bias", bias), ("load", load)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {given(x)}: expected a tensor, a number an expert")
    if bias.ndim != 1 or load.shape[-1:] != bias.shape:
        raise ValueError(
            f"bias has the shape {list(bias.shape)}, and load {list(load.shape)}: expected [E] and [.., E]"
        )
    mean = load.detach().reshape(-1, len(bias)).mean(0)
    return bias + rate * torch.sign(mean.mean() - mean).to(bias.dtype)


def stats(routing: Routing, capacity: float | None = None, axis: AxisName = None) -> dict[str, torch.Tensor]:
    """Return what to watch of a layer of experts, over all ranks.

    Args:
        routing: of sequences `[s, t]`.
        capacity: that of the layer.
        axis: the axes of the data; `None` for those of the running step.

    Returns:
        `load` `[E]`: each expert's share of the choices. `dropped`: the share of the choices that found no seat, or
        went nowhere. `entropy`: that of a token's scores in nats, log(E) at most. All are equal on all ranks, and
        without gradients.

    Raises:
        ValueError: if `capacity` is not positive, or the routing is not of sequences of tokens.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> routing = moe.route(torch.tensor([[[5.0, 0.0], [5.0, 0.0], [5.0, 0.0], [0.0, 5.0]]]), k=1)
        >>> moe.stats(routing, capacity=1.0)
        {'load': tensor([0.7500, 0.2500]), 'dropped': tensor(0.2500), 'entropy': tensor(0.0402)}
    """
    counts = _counts(routing)
    t, k = routing.experts.shape[-2:]
    c = seats_of_an_expert(t, k, counts.shape[-1], capacity)
    dtype = routing.probs.dtype
    seated = counts.clamp(max=c).sum(-1).to(dtype).mean() / max(t * k, 1)
    probs = routing.probs.detach()
    entropy = torch.special.entr(probs / probs.sum(-1, keepdim=True)).sum(-1).mean()
    load, seated, entropy = pmean((_shares(routing).mean(0), seated, entropy), axis)
    return {"load": load, "dropped": 1 - seated, "entropy": entropy}
