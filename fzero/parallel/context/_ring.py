"""Ring attention: keys and values go round the ranks, and each rank attends to one part of them after the other.

Two parts of keys and values are in memory at a time: the one in use, and the one that arrives. The forward pass
combines results by their logs of sums of exponentials (arXiv:2310.01889). The backward pass goes round once more, and
the gradients of keys and values travel with them. Causal attention takes the same time on each rank, since each holds
an early and a late part of the sequence (arXiv:2311.09431).

One rank alone is a ring without steps. So it also serves attention with a mask within a rank.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fzero._dtypes import at_least_float32
from fzero._torch import allow_in_graph, attention_block, attention_block_grad
from fzero.axes import Axis, Binding, index_on
from fzero.collectives import DimOptions, apply, in_front, mapped_binding
from fzero.parallel.context._layout import from_rank_order, positions_of
from fzero.parallel.context._ring_pattern import AttentionOptions, Half, Mask, Ring, RingPattern
from fzero.random import apply_mask, keep_mask_at

__all__ = ["dropout_attention", "ring_attention"]

# ---------------------------------------------------------------- one block


def _merged(x: torch.Tensor) -> torch.Tensor:
    """Make the leading dimensions of `[.., h, t, d]` one."""
    return x.reshape(x.shape[:-3].numel(), *x.shape[-3:])


def _block(
    pattern: RingPattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys: `[.., h, t, e]` and `[.., h, t]`, in float32 at least."""
    lead, scale, softcap = q.shape[:-3], pattern.options.scale, pattern.options.softcap
    qs, ks, vs = _merged(q), _merged(k), _merged(v)
    if mask is None:
        results = [attention_block(qs, ks, vs, None, causal, scale, softcap)]
    else:
        results = [
            attention_block(qs[..., r, :], ks[..., c, :], vs[..., c, :], mask.of(r, c, lead), False, scale, softcap)
            for r, c in mask.tiles()
        ]
    out, log_sum = (xs[0] if len(xs) == 1 else torch.cat(xs, 2) for xs in zip(*results, strict=True))
    return at_least_float32(out.reshape(*lead, *out.shape[1:])), log_sum.reshape(*lead, *log_sum.shape[1:])


class _Result(NamedTuple):
    """What the backward pass of queries needs: the gradient, the result and the log of the sum of exponentials."""

    grad: torch.Tensor
    out: torch.Tensor
    log_sum: torch.Tensor


def _block_grad(
    pattern: RingPattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: _Result,
    mask: Mask | None,
    causal: bool,
) -> list[torch.Tensor]:
    """Return what a block adds to the gradients of q, k and v, in float32 at least."""
    lead, scale, softcap = q.shape[:-3], pattern.options.scale, pattern.options.softcap
    qs, ks, vs, grad, out = (_merged(x) for x in (q, k, v, result.grad, result.out))
    log_sum = result.log_sum.reshape(lead.numel(), *result.log_sum.shape[-2:])
    if mask is None:
        grads = attention_block_grad(grad, qs, ks, vs, None, out, log_sum, causal, scale, softcap)
    else:
        to_qs, to_k, to_v = [], torch.zeros((), device=q.device), torch.zeros((), device=q.device)
        for r, c in mask.tiles():
            keep, keys, values = mask.of(r, c, lead), ks[..., c, :], vs[..., c, :]
            tile = [x[..., r, :] for x in (grad, qs, out)]
            results = tile[2], log_sum[..., r]
            of_tile = attention_block_grad(tile[0], tile[1], keys, values, keep, *results, False, scale, softcap)
            to_qs.append(of_tile[0])
            rest = [0, 0, c.start, ks.shape[-2] - c.stop]
            to_k, to_v = (x + F.pad(at_least_float32(y), rest) for x, y in zip((to_k, to_v), of_tile[1:], strict=True))
        grads = torch.cat(to_qs, 2), to_k, to_v
    return [at_least_float32(x).reshape(*lead, *x.shape[1:]) for x in grads]


# ---------------------------------------------------------------- the way round


def _attend(
    pattern: RingPattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention to the keys of all ranks, and the logs of the sums of exponentials.

    A sink is one more key of each query, whose value is zero: it enters the sums once, after the keys of all ranks.
    """
    held = pattern.ring.message(k, v, pattern.documents)
    outs: list[torch.Tensor] = []
    log_sums: list[torch.Tensor] = []
    for step in range(pattern.ring.size):
        following = pattern.ring.shift(held) if step + 1 < pattern.ring.size else held
        for pair in pattern.pairs(step):
            queries, keys, values = pattern.take_pair(pair, q, k, v)
            causal = pattern.options.causal and step == 0 and not pattern.masked
            out, log_sum = _block(pattern, queries, keys, values, pattern.mask(pair, step, held.documents), causal)
            if step == 0:
                outs, log_sums = list(out.chunk(pattern.halves, -2)), list(log_sum.chunk(pattern.halves, -1))
                continue
            for i, where in pattern.targets(pair.queries):
                chosen = None if where is None else pattern.ring.like(where, log_sum.ndim)
                here = log_sum if chosen is None else torch.where(chosen, log_sum, -math.inf)
                outs[i], log_sums[i] = _combine(outs[i], log_sums[i], out, here)
        held, (k, v) = following, following.pair()
    out, log_sum = torch.cat(outs, -2), torch.cat(log_sums, -1)
    if sinks is not None:
        total = torch.logaddexp(log_sum, sinks.unsqueeze(-1))
        out, log_sum = out * (log_sum - total).exp().unsqueeze(-1), total
    return out.to(q.dtype), log_sum


def _combine(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine results of attention to two sets of keys, of which the first is not empty."""
    total = torch.logaddexp(log_sum, log_more)
    return out * (log_sum - total).exp().unsqueeze(-1) + more * (log_more - total).exp().unsqueeze(-1), total


def _attend_grad(
    pattern: RingPattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    result: _Result,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and sinks, if there are any.

    Those of keys travel with the keys, and end at the rank that has them.
    """
    size, dtypes = pattern.ring.size, (q.dtype, k.dtype, v.dtype)
    to_q, own, sent = [], [], []
    held = pattern.ring.message(k, v, pattern.documents)
    for step in range(size):
        following = pattern.ring.shift(held) if step + 1 < size else held
        if step > 1:
            sent = _in_parts(pattern, _shifted(pattern, sent))
        elif step == 1:
            sent = [[torch.zeros_like(x) for x in xs] for xs in own]
        for pair in pattern.pairs(step):
            queries, keys, values = pattern.take_pair(pair, q, k, v)
            of_pair = _Result(
                pattern.take(result.grad, pair.queries, -2),
                pattern.take(result.out, pair.queries, -2),
                pattern.take(result.log_sum, pair.queries, -1),
            )
            causal = pattern.options.causal and step == 0 and not pattern.masked
            mask = pattern.mask(pair, step, held.documents)
            grads = _block_grad(pattern, queries, keys, values, of_pair, mask, causal)
            if step == 0:
                to_q, *own = _in_parts(pattern, grads)
                continue
            _add(pattern, to_q, grads[0], pair.queries)
            for total, grad in zip(sent, grads[1:], strict=True):
                _add(pattern, total, grad, pair.keys)
        held, (k, v) = following, following.pair()
    to_k, to_v = (torch.cat(xs, -2) for xs in own)
    if size > 1:
        to_k, to_v = (x + y for x, y in zip((to_k, to_v), _shifted(pattern, sent), strict=True))
    grads = torch.cat(to_q, -2).to(dtypes[0]), to_k.to(dtypes[1]), to_v.to(dtypes[2])
    if sinks is None:
        return grads
    weights = (sinks.unsqueeze(-1) - result.log_sum).exp()  # of the sinks
    to_weights = -(at_least_float32(result.grad) * at_least_float32(result.out)).sum(-1)
    return *grads, (weights * to_weights).sum(-1)


def _shifted(pattern: RingPattern, sent: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Send the gradients of keys and values, each in parts, to the next rank."""
    to_k, to_v = (torch.cat(xs, -2) for xs in sent)
    return pattern.ring.shift(pattern.ring.message(to_k, to_v)).pair()


def _in_parts(pattern: RingPattern, xs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(x.chunk(pattern.halves, -2)) for x in xs]


def _add(pattern: RingPattern, total: list[torch.Tensor], x: torch.Tensor, half: Half) -> None:
    """Add a gradient to the parts of a total that it belongs to."""
    for i, where in pattern.targets(half):
        total[i] = total[i] + (x if where is None else torch.where(pattern.ring.like(where, x.ndim), x, 0.0))


# ---------------------------------------------------------------- derivatives


class _Attention(torch.autograd.Function):
    """Attention, and the logs of the sums of exponentials."""

    @staticmethod
    def forward(
        token: torch.Tensor,
        binding: Binding,
        options: AttentionOptions,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> Any:
        return _run(Ring(token, binding, index_on(q.device, token, binding)), options, q, k, v, sinks, documents)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[:3]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[3:], *output)
        ctx.save_for_forward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        *inputs, out, log_sum = ctx.saved_tensors
        grads = _AttentionGrad.apply(*ctx.axis, grad, *inputs, out, log_sum)
        return None, None, None, *grads, *[None] * (5 - len(grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *values, documents = ctx.saved_tensors
        f, values = partial(_by_definition, *ctx.axis, documents), _present(values)
        return torch.func.jvp(f, values, _dense(tangents[3:], values))[1], None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _mapped(_Attention, _run, info.batch_size, in_dims, *inputs)


class _AttentionGrad(torch.autograd.Function):
    """The gradients of q, k, v and sinks. They are functions of these and `grad`: the rest saves work."""

    @staticmethod
    def forward(
        token: torch.Tensor, binding: Binding, options: AttentionOptions, grad: torch.Tensor, *saved: Any
    ) -> Any:
        return _run_grad(Ring(token, binding, index_on(grad.device, token, binding)), options, grad, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[:3]
        ctx.save_for_backward(*inputs[3:9])
        ctx.save_for_forward(*inputs[3:9])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *values, documents = ctx.saved_tensors
        f = partial(_grad_by_definition, *ctx.axis, documents)
        of_values = torch.func.vjp(f, *_present(values))[1](grads)
        return None, None, None, *of_values, *[None] * (8 - len(of_values))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *values, documents = ctx.saved_tensors
        f, values = partial(_grad_by_definition, *ctx.axis, documents), _present(values)
        return torch.func.jvp(f, values, _dense(tangents[3:], values))[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _mapped(_AttentionGrad, _run_grad, info.batch_size, in_dims, *inputs)


def _run(
    ring: Ring,
    options: AttentionOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend(RingPattern(ring, options, q.shape[-2], documents), q, k, v, sinks)


def _run_grad(
    ring: Ring,
    options: AttentionOptions,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    result = _Result(grad, out, log_sum)
    return _attend_grad(RingPattern(ring, options, q.shape[-2], documents), q, k, v, sinks, result)


def _mapped(
    function: Any,
    run: Any,
    n: int,
    in_dims: Any,
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    *xs: torch.Tensor | None,
) -> Any:
    """Apply a function under a vmap: that of the axis, whose ranks it computes all at once, or any other."""
    rows = [None if x is None else in_front(x, d, n) for x, d in zip(xs, in_dims[3:], strict=True)]
    if in_dims[0] is None:
        ys = function.apply(token, mapped_binding(binding, n), options, *rows)
    else:
        device = next(x.device for x in xs if x is not None)
        ys = run(Ring(token, binding, torch.arange(n, device=device)), options, *rows)
    return ys, (0,) * len(ys)


def _by_definition(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend by the definition, to gathered keys and with all weights in memory.

    It serves derivatives of higher orders, and dropout, whose mask is that of the weights `[.., h, T, T]` of whole
    sequences: it depends on the key and not on the ranks.
    """

    def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
        (x,) = apply(token, "all_gather", binding, DimOptions(dim), x)
        return from_rank_order(x, binding.size, dim)

    t, size, groups = q.shape[-2], binding.size, q.shape[-3] // k.shape[-3]
    queries, keys = positions_of(index_on(q.device, token, binding), size, t), torch.arange(t * size, device=q.device)
    keep = options.keep(queries, keys)
    if documents is not None:
        own, all_of_them = documents.unsqueeze(-1), gathered(documents, -1).unsqueeze(-2)
        keep = keep & (own == all_of_them).unsqueeze(-3)
    wide_q, wide_k, wide_v = at_least_float32(q), at_least_float32(gathered(k, -2)), at_least_float32(gathered(v, -2))
    scores = (wide_q @ wide_k.repeat_interleave(groups, -3).mT) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = torch.where(keep, scores, -math.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        last = sinks.unsqueeze(-1).unsqueeze(-1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, last], -1).softmax(-1)[..., :-1]
    if key is not None:
        places = torch.arange(q.shape[:-2].numel(), device=q.device).view(*q.shape[:-2], 1, 1) * t * size
        places = (places + queries.unsqueeze(-1)) * t * size + keys
        weights = apply_mask(weights, keep_mask_at(key, dropout, places), dropout)
    return (weights @ wide_v.repeat_interleave(groups, -3)).to(q.dtype)


def _grad_by_definition(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    grad: torch.Tensor,
    *values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and sinks, if there are any."""
    return torch.func.vjp(partial(_by_definition, token, binding, options, documents), *values)[1](grad)


def _present(values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple([x for x in values if x is not None])  # the last of them, the sinks, may be missing


def _dense(tangents: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(values, tangents, strict=False)])


@allow_in_graph  # as collectives/_table.py has it
def _applied(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    return _Attention.apply(token, binding, options, q, k, v, sinks, documents)[0]


def dropout_attention(
    axis: Axis,
    options: AttentionOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
    dropout: float,
    key: torch.Tensor,
) -> torch.Tensor:
    """Attend as `ring_attention` does, and drop weights by a key."""
    return _by_definition(axis.token, axis.binding, options, documents, q, k, v, sinks, dropout, key)


def ring_attention(
    axis: Axis,
    options: AttentionOptions,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from this rank's queries `[.., h, t, d]` to the keys of all ranks of an axis.

    Args:
        axis: the axis; `NO_AXIS` for this rank's keys alone.
        options: which tokens attend to which, the scale and the cap.
        q: `[.., h, t, d]`, this rank's tokens in the order of `positions`.
        k: `[.., h / g, t, d]`.
        v: `[.., h / g, t, e]`.
        sinks: `[.., h]`, in float32 at least: one more score of each query, for a key without a value; None for none.
        documents: int64 `[.., t]`: tokens attend to those of the same number; None for one document.

    Returns:
        `[.., h, t, e]`.
    """
    return _applied(axis.token, axis.binding, options, q, k, v, sinks, documents)
