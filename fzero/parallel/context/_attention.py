"""Attention of tokens that are split over an axis, by an all_to_all of heads or by a ring of keys."""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from fzero._arguments import check_choice, is_int
from fzero._torch.levels import may_differ
from fzero._tracebacks import api_boundary
from fzero.axes import averaged_axes, axis_if_bound, axis_size, bound_axis, index_on
from fzero.collectives import NO_AXIS, all_gather, all_to_all
from fzero.parallel.context._layout import check_tokens_split, from_rank_order, to_rank_order
from fzero.parallel.context._ring_autograd import dropout_attention, ring_attention
from fzero.parallel.context._ring_pattern import AttentionOptions, Qkv

__all__ = ["attention"]

_HEADS, _TOKENS = -3, -2
_METHODS = ("all_to_all", "ring")


@api_boundary
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    key: torch.Tensor | None = None,
    axis: str = "cp",
    method: Literal["all_to_all", "ring"] | None = None,
) -> torch.Tensor:
    """Attend to the tokens of all ranks of an axis: `scaled_dot_product_attention` of split sequences.

    Two methods compute the same. "all_to_all" gives each rank all tokens of some heads (DeepSpeed's Ulysses,
    arXiv:2309.14509). "ring" keeps the tokens, and sends keys and values from rank to rank (arXiv:2310.01889): any
    number of heads works, and no rank holds a whole sequence. If the axis is not bound, this rank holds all tokens.

    Args:
        q: `[.., h, t, d]`: this rank's t tokens of h heads, in the order of `positions`.
        k: `[.., h / g, t, d]`: each head serves g heads of queries.
        v: `[.., h / g, t, e]`.
        causal: whether a token attends only to itself and to the tokens before it.
        window: a token attends only to tokens at distances below it; None for any distance.
        documents: ints `[.., t]`: a token attends only to tokens with the same number; None for one document.
        scale: the factor of the products; by default `1 / sqrt(d)`.
        softcap: the bound of the products, `softcap * tanh(products / softcap)`, as in Gemma 2; None for none. No
            kernel of torch has it, so products are in memory, of up to a 64th of the queries at a time.
        sinks: `[h]`: one more product of each query of a head, for a key whose value is zero, as in GPT-OSS.
        dropout: the probability with which a weight is dropped. Then keys are gathered, and all weights of this rank's
            tokens are in memory, `[.., h, t, n t]`.
        key: the key that determines which weights are dropped, whatever the number of ranks.
        axis: the axis along which tokens are split.
        method: "all_to_all" or "ring"; by default the first if the axis divides the heads, else the second.

    Returns:
        `[.., h, t, e]`, this rank's tokens.

    Raises:
        ValueError: if shapes do not match, t is odd, or an option is invalid. Also if the axis does not divide the
            heads with "all_to_all", or the step does not average over the axis.
        TypeError: if `documents` are not ints, `sinks` are not floating point, or `dropout` is given without a key.

    Example:
        >>> import fzero
        >>> from fzero.parallel import context
        >>> mesh = fzero.mesh(dp=1, cp=2)
        >>> x = torch.randn(1, 3, 8, 4)  # three heads of eight tokens
        >>> own = context.split(mesh, x, dims=2)
        >>> y = mesh.spmd(lambda x: fzero.PerRank(context.attention(x, x, x, causal=True)))(own)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(y.value, context.split(mesh, expected, dims=2).value, atol=1e-6)
        True
    """
    bound = axis_if_bound(axis)
    n = axis_size(bound)
    _check_values(q, k, v, documents, n)
    _check_options(window, scale, softcap, method)
    if sinks is not None:
        sinks = _expand_sink(sinks, q)
    check_tokens_split(axis, q.shape[_TOKENS])
    if n > 1:
        _check_average(axis)
        _check_differs(q, axis)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    options = AttentionOptions(bool(causal), window, scale, softcap)
    qkv = Qkv(q=q, k=k, v=v, sinks=sinks, documents=documents)
    if not q.shape[_TOKENS]:  # the kernels divide by the number of tokens
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    if dropout:
        if key is None:
            raise TypeError(f"dropout={dropout!r} needs key=, a key of fzero.random: the same on all ranks of {axis!r}")
        own_axis = bound_axis(axis) if bound else NO_AXIS
        return dropout_attention(own_axis, options, qkv, dropout, key)
    if n == 1:
        return _attend_locally(qkv, options)
    if method is None:
        method = "all_to_all" if q.shape[_HEADS] % n == 0 else "ring"
    if method == "ring":
        return ring_attention(bound_axis(axis), options, qkv)
    return _attend_by_heads(qkv, options, axis, n)


def _attend_by_heads(qkv: Qkv, options: AttentionOptions, axis: str, n: int) -> torch.Tensor:
    """Attend to all tokens with a part of the heads, and send the tokens back."""
    q, k, v, sinks, documents = qkv
    heads = q.shape[_HEADS]
    if heads % n:
        raise ValueError(
            f'method="all_to_all": {heads} heads do not divide by the {n} ranks along {axis!r}; use method="ring"'
        )

    def all_tokens(x: torch.Tensor) -> torch.Tensor:
        copies = math.lcm(x.shape[_HEADS], n) // x.shape[_HEADS]  # of a head that serves queries of several ranks
        x = x if copies == 1 else x.repeat_interleave(copies, _HEADS)
        return from_rank_order(all_to_all(x, axis, split_dim=_HEADS, concat_dim=_TOKENS), n, _TOKENS)

    if documents is not None:
        documents = from_rank_order(all_gather(documents, axis, dim=-1), n, -1)
    if sinks is not None:  # those of this rank's heads
        own_axis, by_rank = bound_axis(axis), sinks.unflatten(-1, (n, heads // n))
        is_own = torch.arange(n, device=q.device) == index_on(q.device, own_axis.token, own_axis.binding)
        sinks = torch.where(is_own.unsqueeze(-1), by_rank, 0.0).sum(-2)
    y = _attend_locally(
        Qkv(q=all_tokens(q), k=all_tokens(k), v=all_tokens(v), sinks=sinks, documents=documents), options
    )
    return all_to_all(to_rank_order(y, n, _TOKENS), axis, split_dim=_TOKENS, concat_dim=_HEADS)


def _attend_locally(qkv: Qkv, options: AttentionOptions) -> torch.Tensor:
    """Attend to the tokens of this rank, by torch's own function if it supports the options."""
    q, k, v, sinks, documents = qkv
    if sinks is not None or documents is not None or options.window is not None or options.softcap is not None:
        return ring_attention(NO_AXIS, options, qkv)
    lead, has_groups = q.shape[:_HEADS], q.shape[_HEADS] != k.shape[_HEADS]
    # the fused kernels take four dimensions
    q, k, v = (x.reshape(lead.numel(), *x.shape[_HEADS:]) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=options.causal, scale=options.scale, enable_gqa=has_groups)
    return y.reshape(*lead, *y.shape[1:])


def _check_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, n: int) -> None:
    """Raise an error for queries, keys, values or documents whose shapes do not belong together."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if min(q.ndim, k.ndim, v.ndim) < 3 or q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{shapes}: expected [.., heads, tokens, width], with as many heads and tokens of k as of v")
    if q.shape[-2:] != k.shape[-2:]:
        raise ValueError(f"{shapes}: expected as many tokens of q as of k, and one width of both")
    if not k.shape[_HEADS] or q.shape[_HEADS] % k.shape[_HEADS]:
        raise ValueError(
            f"{shapes}: the {q.shape[_HEADS]} heads of q do not divide by the {k.shape[_HEADS]} heads of k"
        )
    if n > 1 and q.shape[_TOKENS] % 2:
        raise ValueError(
            f"{shapes}: each rank holds two equal parts of a sequence, and {q.shape[_TOKENS]} tokens are odd; split "
            "the batch by fzero.parallel.context.split, which can pad it"
        )
    if documents is None:
        return
    expected = [*q.shape[:-3], q.shape[-2]]
    if list(documents.shape) != expected:
        raise ValueError(f"documents have the shape {list(documents.shape)}: expected {expected}, one for each token")
    if documents.is_floating_point() or documents.is_complex() or documents.dtype is torch.bool:
        raise TypeError(f"documents are {documents.dtype}: expected ints, the number of each token's document")


def _expand_sink(sinks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return `[.., h]`: a sink for each head of each sequence, in the dtype of sums of exponentials."""
    if list(sinks.shape) != [q.shape[_HEADS]]:
        raise ValueError(
            f"sinks have the shape {list(sinks.shape)}: expected [{q.shape[_HEADS]}], one for each head of q, which is "
            f"{list(q.shape)}"
        )
    if not sinks.is_floating_point():
        raise TypeError(f"sinks are {sinks.dtype}: expected floating point, the scores of keys without values")
    return sinks.to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:_TOKENS])


def _check_options(window: int | None, scale: float | None, softcap: float | None, method: str | None) -> None:
    if window is not None and (not is_int(window) or window < 1):
        raise ValueError(f"window={window!r}: expected an int above 0, or None for any distance")
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale) and scale):
        raise ValueError(f"scale={scale!r}: expected a finite number other than 0, or None for 1 / sqrt(width)")
    if softcap is not None and not (isinstance(softcap, int | float) and math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap!r}: expected a finite number above 0, or None for no bound")
    check_choice("method", method, (*_METHODS, None))


def _check_average(axis: str) -> None:
    """Check that the step averages over the axis: each rank computes the loss of its own tokens.

    Raises:
        ValueError: if it averages over other axes only.
    """
    averaged = averaged_axes()
    if averaged and axis not in averaged:
        raise ValueError(
            f"axis={axis!r}: its ranks compute the losses of different tokens, but the step does not average over it, "
            f"fzero.shard(axis={averaged}): add {axis!r}, or leave axis out for all axes"
        )


def _check_differs(q: torch.Tensor, axis: str) -> None:
    """Check, in a simulation by vmap, that the ranks of an axis have queries of different tokens.

    Raises:
        ValueError: if they have the same.
    """
    if not may_differ(q, bound_axis(axis).token):
        raise ValueError(
            f"axis={axis!r}: its ranks hold the same q, but each attends for tokens of its own; split the tokens by "
            f"fzero.parallel.context.split(mesh, batch, axis={axis!r}), or take x[:, context.positions(t)] of whole "
            "sequences"
        )
