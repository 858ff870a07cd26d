"""Ring attention: keys and values go round the ranks, and each rank attends to one part of them after the other.

Two parts of keys and values are in memory at a time: the one in use, and the one that arrives. The forward pass
combines results by their logs of sums of exponentials (arXiv:2310.01889). The backward pass goes round once more, and
the gradients of keys and values travel with them. Causal attention takes the same time on each rank, since each holds
an early and a late part of the sequence (arXiv:2311.09431).

One rank alone is a ring without steps. So it also serves attention with a mask within a rank.
"""

import math
from collections.abc import Sequence

import torch

from fzero._dtypes import at_least_float32
from fzero.parallel.context._ring_pattern import AttentionOptions, Half, HalfPair, Qkv, Ring, RingPattern
from fzero.parallel.context._tiled_attention import RingResult, tiled_attention, tiled_attention_grad

__all__ = ["attend", "attend_grad"]


def attend(ring: Ring, options: AttentionOptions, qkv: Qkv) -> tuple[torch.Tensor, torch.Tensor]:
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
            out, log_sum = tiled_attention(
                pattern, q=queries, k=keys, v=values, mask=pattern.mask(pair, step, kv.documents), causal=causal
            )
            if step == 0:
                outs, log_sums = list(out.chunk(pattern.halves, -2)), list(log_sum.chunk(pattern.halves, -1))
                continue
            for i, where in pattern.targets(pair.queries):
                mask = None if where is None else ring.like(where, log_sum.ndim)
                masked_log_sum = log_sum if mask is None else torch.where(mask, log_sum, -math.inf)
                outs[i], log_sums[i] = _combine_attention(outs[i], log_sums[i], out, masked_log_sum)
        kv, (k, v) = next_kv, next_kv.pair()
    out, log_sum = torch.cat(outs, -2), torch.cat(log_sums, -1)
    if sinks is not None:
        total = torch.logaddexp(log_sum, sinks.unsqueeze(-1))
        out, log_sum = out * (log_sum - total).exp().unsqueeze(-1), total
    return out.to(q.dtype), log_sum


def _combine_attention(
    out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine results of attention to two sets of keys, of which the first is not empty."""
    total = torch.logaddexp(log_sum, log_more)
    return out * (log_sum - total).exp().unsqueeze(-1) + more * (log_more - total).exp().unsqueeze(-1), total


def attend_grad(ring: Ring, options: AttentionOptions, qkv: Qkv, result: RingResult) -> tuple[torch.Tensor, ...]:
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
            grads = _pair_grads(pattern, pair, step, Qkv(q, k, v, documents=kv.documents), result)
            if step == 0:
                dq, *local_dkv = _chunk_halves(pattern, grads)
                continue
            _add_half(pattern, dq, grads[0], pair.queries)
            for total, grad in zip(travelling_dkv, grads[1:], strict=True):
                _add_half(pattern, total, grad, pair.keys)
        kv, (k, v) = next_kv, next_kv.pair()
    dk, dv = (torch.cat(xs, -2) for xs in local_dkv)
    if ring.size > 1:
        dk, dv = (x + y for x, y in zip((dk, dv), _shift_dkv(pattern, travelling_dkv), strict=True))
    grads = torch.cat(dq, -2).to(qkv.q.dtype), dk.to(qkv.k.dtype), dv.to(qkv.v.dtype)
    return grads if sinks is None else (*grads, _sink_grad(sinks, result))


def _pair_grads(pattern: RingPattern, pair: HalfPair, step: int, qkv: Qkv, result: RingResult) -> list[torch.Tensor]:
    """Return the gradients of the queries, keys and values of a pair. `qkv` has the keys that came at this step."""
    queries, keys, values = pattern.take_pair(pair, qkv.q, qkv.k, qkv.v)
    pair_result = RingResult(
        pattern.take(result.grad, pair.queries, -2),
        pattern.take(result.out, pair.queries, -2),
        pattern.take(result.log_sum, pair.queries, -1),
    )
    causal = pattern.options.causal and step == 0 and not pattern.masked
    mask = pattern.mask(pair, step, qkv.documents)
    return tiled_attention_grad(pattern, q=queries, k=keys, v=values, result=pair_result, mask=mask, causal=causal)


def _sink_grad(sinks: torch.Tensor, result: RingResult) -> torch.Tensor:
    """Return the gradient of sinks, from their weights and the weights' gradients."""
    weights = (sinks.unsqueeze(-1) - result.log_sum).exp()
    dweights = -(at_least_float32(result.grad) * at_least_float32(result.out)).sum(-1)
    return (weights * dweights).sum(-1)


def _shift_dkv(pattern: RingPattern, dkv: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Send the gradients of keys and values, each in halves, to the next rank."""
    dk, dv = (torch.cat(xs, -2) for xs in dkv)
    return pattern.ring.shift(pattern.ring.message(dk, dv)).pair()


def _chunk_halves(pattern: RingPattern, xs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(x.chunk(pattern.halves, -2)) for x in xs]


def _add_half(pattern: RingPattern, total: list[torch.Tensor], x: torch.Tensor, half: Half) -> None:
    """Add a gradient to the parts of a total that it belongs to."""
    for i, where in pattern.targets(half):
        total[i] = total[i] + (x if where is None else torch.where(pattern.ring.like(where, x.ndim), x, 0.0))
