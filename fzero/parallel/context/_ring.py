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
from fzero.parallel.context._ring_pattern import AttentionOptions, Half, Mask, Qkv, Ring, RingPattern
from fzero.random import apply_mask, keep_mask_at

__all__ = ["dropout_attention", "ring_attention"]

# ---------------------------------------------------------------- one block


def _flatten_batch(x: torch.Tensor) -> torch.Tensor:
    """Make the leading dimensions of `[.., h, t, d]` one."""
    return x.reshape(x.shape[:-3].numel(), *x.shape[-3:])


def _block(
    pattern: RingPattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys: return the result `[.., h, t, e]` and the log sums `[.., h, t]`, in float32 at least."""
    lead, scale, softcap = q.shape[:-3], pattern.options.scale, pattern.options.softcap
    qs, ks, vs = _flatten_batch(q), _flatten_batch(k), _flatten_batch(v)
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
    """The result of attention, the log of its sum of exponentials, and the gradient that came back for it."""

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
    qs, ks, vs, grad, out = (_flatten_batch(x) for x in (q, k, v, result.grad, result.out))
    log_sum = result.log_sum.reshape(lead.numel(), *result.log_sum.shape[-2:])
    if mask is None:
        grads = attention_block_grad(grad, qs, ks, vs, None, out, log_sum, causal, scale, softcap)
    else:
        dqs, dk, dv = [], torch.zeros((), device=q.device), torch.zeros((), device=q.device)
        for r, c in mask.tiles():
            keep, keys, values = mask.of(r, c, lead), ks[..., c, :], vs[..., c, :]
            tile = [x[..., r, :] for x in (grad, qs, out)]
            results = tile[2], log_sum[..., r]
            tile_grads = attention_block_grad(tile[0], tile[1], keys, values, keep, *results, False, scale, softcap)
            dqs.append(tile_grads[0])
            padding = [0, 0, c.start, ks.shape[-2] - c.stop]
            dk, dv = (x + F.pad(at_least_float32(y), padding) for x, y in zip((dk, dv), tile_grads[1:], strict=True))
        grads = torch.cat(dqs, 2), dk, dv
    return [at_least_float32(x).reshape(*lead, *x.shape[1:]) for x in grads]


# ---------------------------------------------------------------- the ring


def _attend(ring: Ring, options: AttentionOptions, qkv: Qkv) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention to the keys of all ranks, and the logs of the sums of exponentials.

    A sink is one more key of each query, whose value is zero: it enters the sums once, after the keys of all ranks.
    """
    q, k, v, sinks, documents = qkv
    pattern = RingPattern(ring, options, q.shape[-2], documents)
    kv = ring.message(k, v, documents)
    outs: list[torch.Tensor] = []
    log_sums: list[torch.Tensor] = []
    for step in range(ring.size):
        next_kv = ring.shift(kv) if step + 1 < ring.size else kv
        for pair in pattern.pairs(step):
            queries, keys, values = pattern.take_pair(pair, q, k, v)
            causal = options.causal and step == 0 and not pattern.masked
            out, log_sum = _block(pattern, queries, keys, values, pattern.mask(pair, step, kv.documents), causal)
            if step == 0:
                outs, log_sums = list(out.chunk(pattern.halves, -2)), list(log_sum.chunk(pattern.halves, -1))
                continue
            for i, where in pattern.targets(pair.queries):
                mask = None if where is None else ring.like(where, log_sum.ndim)
                masked_log_sum = log_sum if mask is None else torch.where(mask, log_sum, -math.inf)
                outs[i], log_sums[i] = _combine(outs[i], log_sums[i], out, masked_log_sum)
        kv, (k, v) = next_kv, next_kv.pair()
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


def _attend_grad(ring: Ring, options: AttentionOptions, qkv: Qkv, result: _Result) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and sinks, if there are any.

    Those of keys travel with the keys, and end at the rank that has them.
    """
    q, k, v, sinks, documents = qkv
    pattern = RingPattern(ring, options, q.shape[-2], documents)
    dq, local_dkv, travelling_dkv = [], [], []
    kv = ring.message(k, v, documents)
    for step in range(ring.size):
        next_kv = ring.shift(kv) if step + 1 < ring.size else kv
        if step > 1:
            travelling_dkv = _chunk_halves(pattern, _shift_dkv(pattern, travelling_dkv))
        elif step == 1:
            travelling_dkv = [[torch.zeros_like(x) for x in xs] for xs in local_dkv]
        for pair in pattern.pairs(step):
            queries, keys, values = pattern.take_pair(pair, q, k, v)
            pair_result = _Result(
                pattern.take(result.grad, pair.queries, -2),
                pattern.take(result.out, pair.queries, -2),
                pattern.take(result.log_sum, pair.queries, -1),
            )
            causal = options.causal and step == 0 and not pattern.masked
            mask = pattern.mask(pair, step, kv.documents)
            grads = _block_grad(pattern, queries, keys, values, pair_result, mask, causal)
            if step == 0:
                dq, *local_dkv = _chunk_halves(pattern, grads)
                continue
            _add(pattern, dq, grads[0], pair.queries)
            for total, grad in zip(travelling_dkv, grads[1:], strict=True):
                _add(pattern, total, grad, pair.keys)
        kv, (k, v) = next_kv, next_kv.pair()
    dk, dv = (torch.cat(xs, -2) for xs in local_dkv)
    if ring.size > 1:
        dk, dv = (x + y for x, y in zip((dk, dv), _shift_dkv(pattern, travelling_dkv), strict=True))
    grads = torch.cat(dq, -2).to(qkv.q.dtype), dk.to(qkv.k.dtype), dv.to(qkv.v.dtype)
    if sinks is None:
        return grads
    weights = (sinks.unsqueeze(-1) - result.log_sum).exp()  # of the sinks
    dweights = -(at_least_float32(result.grad) * at_least_float32(result.out)).sum(-1)
    return *grads, (weights * dweights).sum(-1)


def _shift_dkv(pattern: RingPattern, dkv: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Send the gradients of keys and values, each in halves, to the next rank."""
    dk, dv = (torch.cat(xs, -2) for xs in dkv)
    return pattern.ring.shift(pattern.ring.message(dk, dv)).pair()


def _chunk_halves(pattern: RingPattern, xs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
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
        return _attend(_ring(token, binding, q.device), options, Qkv(q, k, v, sinks, documents))

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
        f, values = partial(_of_values, *ctx.axis, documents), _present(values)
        return torch.func.jvp(f, values, _dense(tangents[3:], values))[1], None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _mapped(_Attention, _attend_flat, info.batch_size, in_dims, *inputs)


class _AttentionGrad(torch.autograd.Function):
    """The gradients of q, k, v and sinks. They are functions of these and `grad`: the rest saves work."""

    @staticmethod
    def forward(
        token: torch.Tensor, binding: Binding, options: AttentionOptions, grad: torch.Tensor, *saved: Any
    ) -> Any:
        return _attend_grad_flat(_ring(token, binding, grad.device), options, grad, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[:3]
        ctx.save_for_backward(*inputs[3:9])
        ctx.save_for_forward(*inputs[3:9])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *values, documents = ctx.saved_tensors
        f = partial(_grad_of_values, *ctx.axis, documents)
        value_grads = torch.func.vjp(f, *_present(values))[1](grads)
        return None, None, None, *value_grads, *[None] * (8 - len(value_grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *values, documents = ctx.saved_tensors
        f, values = partial(_grad_of_values, *ctx.axis, documents), _present(values)
        return torch.func.jvp(f, values, _dense(tangents[3:], values))[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _mapped(_AttentionGrad, _attend_grad_flat, info.batch_size, in_dims, *inputs)


def _ring(token: torch.Tensor, binding: Binding, device: torch.device) -> Ring:
    return Ring(token, binding, index_on(device, token, binding))


def _attend_flat(ring: Ring, options: AttentionOptions, *qkv: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend(ring, options, Qkv(*qkv))


def _attend_grad_flat(
    ring: Ring, options: AttentionOptions, grad: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor, ...]:
    *qkv, out, log_sum = saved
    return _attend_grad(ring, options, Qkv(*qkv), _Result(grad, out, log_sum))


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


class _Dropout(NamedTuple):
    """The probability that a weight is dropped, and the key that decides."""

    probability: float
    key: torch.Tensor


def _by_definition(ring: Ring, options: AttentionOptions, qkv: Qkv, dropout: _Dropout | None = None) -> torch.Tensor:
    """Attend by the definition, to gathered keys and with all weights in memory.

    It serves derivatives of higher orders, and dropout, whose mask is that of the weights `[.., h, T, T]` of whole
    sequences: it depends on the key and not on the ranks.
    """

    def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
        (x,) = apply(ring.token, "all_gather", ring.binding, DimOptions(dim), x)
        return from_rank_order(x, ring.size, dim)

    q, k, v, sinks, documents = qkv
    t, size, groups = q.shape[-2], ring.size, q.shape[-3] // k.shape[-3]
    queries, keys = positions_of(ring.index, size, t), torch.arange(t * size, device=q.device)
    keep = options.keep(queries, keys)
    if documents is not None:
        keep = keep & (documents.unsqueeze(-1) == gathered(documents, -1).unsqueeze(-2)).unsqueeze(-3)
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
    if dropout is not None:
        places = torch.arange(q.shape[:-2].numel(), device=q.device).view(*q.shape[:-2], 1, 1) * t * size
        places = (places + queries.unsqueeze(-1)) * t * size + keys
        weights = apply_mask(weights, keep_mask_at(dropout.key, dropout.probability, places), dropout.probability)
    return (weights @ wide_v.repeat_interleave(groups, -3)).to(q.dtype)


def _of_values(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    *values: torch.Tensor,
) -> torch.Tensor:
    """Attend by the definition, as a function of q, k, v and sinks, if there are any."""
    qkv = Qkv(*values)._replace(documents=documents)
    return _by_definition(_ring(token, binding, qkv.q.device), options, qkv)


def _grad_of_values(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    grad: torch.Tensor,
    *values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and sinks, if there are any."""
    return torch.func.vjp(partial(_of_values, token, binding, options, documents), *values)[1](grad)


def _present(values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple([x for x in values if x is not None])  # the last of them, the sinks, may be missing


def _dense(tangents: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(values, tangents, strict=False)])


@allow_in_graph  # as collectives/_table.py has it
def _apply(token: torch.Tensor, binding: Binding, options: AttentionOptions, *qkv: torch.Tensor | None) -> torch.Tensor:
    return _Attention.apply(token, binding, options, *qkv)[0]


def dropout_attention(
    axis: Axis, options: AttentionOptions, qkv: Qkv, dropout: float, key: torch.Tensor
) -> torch.Tensor:
    """Attend as `ring_attention` does, and drop weights by a key."""
    return _by_definition(_ring(axis.token, axis.binding, qkv.q.device), options, qkv, _Dropout(dropout, key))


def ring_attention(axis: Axis, options: AttentionOptions, qkv: Qkv) -> torch.Tensor:
    """Attend from this rank's queries to the keys of all ranks of an axis.

    Args:
        axis: the axis; `NO_AXIS` for this rank's keys alone.
        options: which tokens attend to which, the scale and the cap.
        qkv: this rank's tokens in the order of `positions`.

    Returns:
        `[.., h, t, e]`.
    """
    return _apply(axis.token, axis.binding, options, *qkv)
