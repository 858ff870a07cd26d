"""Attention to one part of the keys, in tiles where a mask leaves some out, and its gradients."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from fzero._dtypes import at_least_float32
from fzero._torch import partial_attention, partial_attention_grad
from fzero.parallel.context._ring_pattern import Mask, RingPattern

__all__ = ["RingResult", "tiled_attention", "tiled_attention_grad"]


def _flatten_batch(x: torch.Tensor) -> torch.Tensor:
    """Make the leading dimensions of `[.., h, t, d]` one."""
    return x.reshape(x.shape[:-3].numel(), *x.shape[-3:])


def tiled_attention(
    pattern: RingPattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys: return the result `[.., h, t, e]` and the log sums `[.., h, t]`, in float32 at least."""
    lead, scale, softcap = q.shape[:-3], pattern.options.scale, pattern.options.softcap
    qs, ks, vs = _flatten_batch(q), _flatten_batch(k), _flatten_batch(v)
    if mask is None:
        results = [partial_attention(q=qs, k=ks, v=vs, keep=None, causal=causal, scale=scale, softcap=softcap)]
    else:
        results = [
            partial_attention(
                q=qs[..., r, :],
                k=ks[..., c, :],
                v=vs[..., c, :],
                keep=mask.of(r, c, lead),
                causal=False,
                scale=scale,
                softcap=softcap,
            )
            for r, c in mask.tiles()
        ]
    out, log_sum = (xs[0] if len(xs) == 1 else torch.cat(xs, 2) for xs in zip(*results, strict=True))
    return at_least_float32(out.reshape(*lead, *out.shape[1:])), log_sum.reshape(*lead, *log_sum.shape[1:])


class RingResult(NamedTuple):
    """The result of attention, the log of its sum of exponentials, and the gradient that came back for it."""

    grad: torch.Tensor
    out: torch.Tensor
    log_sum: torch.Tensor


def tiled_attention_grad(
    pattern: RingPattern,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: RingResult,
    mask: Mask | None,
    causal: bool,
) -> list[torch.Tensor]:
    """Return what a part of the keys adds to the gradients of q, k and v, in float32 at least."""
    lead, scale, softcap = q.shape[:-3], pattern.options.scale, pattern.options.softcap
    qs, ks, vs, grad, out = (_flatten_batch(x) for x in (q, k, v, result.grad, result.out))
    log_sum = result.log_sum.reshape(lead.numel(), *result.log_sum.shape[-2:])
    if mask is None:
        grads = partial_attention_grad(
            grad, q=qs, k=ks, v=vs, keep=None, out=out, log_sum=log_sum, causal=causal, scale=scale, softcap=softcap
        )
    else:
        dqs, dk, dv = [], torch.zeros((), device=q.device), torch.zeros((), device=q.device)
        for r, c in mask.tiles():
            keep, keys, values = mask.of(r, c, lead), ks[..., c, :], vs[..., c, :]
            tile = [x[..., r, :] for x in (grad, qs, out)]
            results = tile[2], log_sum[..., r]
            tile_grads = partial_attention_grad(tile[0], tile[1], keys, values, keep, *results, False, scale, softcap)
            dqs.append(tile_grads[0])
            padding = [0, 0, c.start, ks.shape[-2] - c.stop]
            dk, dv = (x + F.pad(at_least_float32(y), padding) for x, y in zip((dk, dv), tile_grads[1:], strict=True))
        grads = torch.cat(dqs, 2), dk, dv
    return [at_least_float32(x).reshape(*lead, *x.shape[1:]) for x in grads]
