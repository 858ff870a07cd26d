"""Attention of queries to a part of the keys, with the log of the sum of exponentials, by torch's kernels."""

import math
from typing import Any

import torch

__all__ = ["partial_attention", "partial_attention_grad"]

_aten: Any = torch.ops.aten
_Partial = tuple[torch.Tensor, torch.Tensor]


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> _Partial:
    """Attend to a part of the keys.

    Args:
        q: `[b, h, t, d]`.
        k: `[b, h / g, s, d]`: each head serves g heads of queries.
        v: `[b, h / g, s, e]`.
        keep: bool `[b, 1, t, s]`: the keys that each query attends to; None for all.
        causal: whether query i attends only to keys 0 to i. Not with `keep`.
        scale: the factor of the products.
        softcap: the bound of the products, `softcap * tanh(products / softcap)`; None for none. No kernel has it.

    Returns:
        `(out, log_sum)`: the mean of values `[b, h, t, e]` in q's dtype, and `[b, h, t]`, the log of the sum of
        exponentials, in float32 at least. Where a query attends to no key, these are 0 and -inf.
    """
    if softcap is not None:
        return _attend_by_definition(q, k, v, keep, causal, scale, softcap)
    if _has_cpu_kernel(q, v):
        out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(q, keep), scale=scale
        )
    elif _has_cuda_kernel(q, v, keep):
        out, log_sum = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        return _attend_by_definition(q, k, v, keep, causal, scale, softcap=None)
    return out, log_sum if keep is None else torch.where(keep.any(-1), log_sum, -math.inf)


def partial_attention_grad(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the share of a part of the keys in the gradients of q, k and v.

    Args:
        grad: the gradient of `out`.
        q: as in `partial_attention`.
        k: as in `partial_attention`.
        v: as in `partial_attention`.
        keep: as in `partial_attention`.
        out: the result of attention to all keys.
        log_sum: the log of the sum of exponentials over all keys.
        causal: as in `partial_attention`.
        scale: as in `partial_attention`.
        softcap: as in `partial_attention`.
    """
    if softcap is not None:
        return _grad_by_definition(grad, q, k, v, keep, out, log_sum, causal, scale, softcap)
    if _has_cpu_kernel(q, v):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, causal, attn_mask=_bias(q, keep), scale=scale
        )
    if _has_cuda_kernel(q, v, keep):
        # Without dropout the kernel reads no seed; without nested tensors it reads no lengths.
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        lengths = None, None, q.shape[-2], k.shape[-2]
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, log_sum, *lengths, 0.0, causal, seed, offset, scale=scale
        )
    return _grad_by_definition(grad, q, k, v, keep, out, log_sum, causal, scale, softcap=None)


def _has_cpu_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether torch's kernel for CPUs serves these shapes. Its stand-in serves plans on the device "meta"."""
    return q.device.type in ("cpu", "meta") and q.shape[-1] == v.shape[-1]


def _has_cuda_kernel(q: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None) -> bool:
    """Return whether FlashAttention serves these: half precision without a mask."""
    width = q.shape[-1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (
        q.device.type == "cuda" and half and keep is None and width == v.shape[-1] and width % 8 == 0 and width <= 256
    )


def _bias(q: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor | None:
    return None if keep is None else torch.where(keep, 0.0, -math.inf).to(q.dtype)


def _scores(
    q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor | None, causal: bool, scale: float, softcap: float | None
) -> torch.Tensor:
    """Return the products `[b, h / g, g, t, s]`, which are -inf where a query does not attend."""
    scores = (_group_queries(q, k) @ k.unsqueeze(2).mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None, None]
    return scores if keep is None else torch.where(keep.unsqueeze(2), scores, -math.inf)


def _group_queries(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Give the queries a dimension of the heads of keys that serve them: `[b, h / g, g, t, d]`."""
    return q.unflatten(1, (k.shape[1], -1))


def _widen(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]


def _attend_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> _Partial:
    wide_q, wide_k, wide_v = _widen(q, k, v)
    scores = _scores(q=wide_q, k=wide_k, keep=keep, causal=causal, scale=scale, softcap=softcap)
    log_sum = scores.logsumexp(-1)
    weights = (scores - torch.where(log_sum == -math.inf, 0.0, log_sum).unsqueeze(-1)).exp()
    out = (weights @ wide_v.unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), log_sum.flatten(1, 2)


def _grad_by_definition(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention's algorithm 4 (arXiv:2205.14135), for a part of the keys."""
    dtypes = q.dtype, k.dtype, v.dtype
    grad, q, k, v, out = _widen(grad, q, k, v, out)
    scores = _scores(q, k, keep, causal, scale, softcap)
    weights = (scores - _group_queries(log_sum, k).unsqueeze(-1)).exp()
    grad, out = _group_queries(grad, k), _group_queries(out, k)
    to_scores = weights * (grad @ v.unsqueeze(2).mT - (grad * out).sum(-1, keepdim=True)) * scale
    if softcap is not None:  # the slope of the cap; a masked score is -inf
        to_scores = to_scores * torch.where(scores == -math.inf, 0.0, 1 - (scores / softcap).square())
    to_q = (to_scores @ k.unsqueeze(2)).flatten(1, 2)
    to_k = (to_scores.mT @ _group_queries(q, k)).sum(2)
    to_v = (weights.mT @ grad).sum(2)
    return to_q.to(dtypes[0]), to_k.to(dtypes[1]), to_v.to(dtypes[2])
