"""Ring attention as a function with derivatives of any order, under any vmap.

The first derivative goes round the ring. Those of higher orders, and dropout, are computed by the definition, with all
weights in memory.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fzero._dtypes import at_least_float32
from fzero._torch import allow_in_graph
from fzero.axes import Axis, Binding, index_on
from fzero.collectives import DimOptions, apply, mapped_binding, move_to_front
from fzero.parallel.context._layout import compute_positions, from_rank_order
from fzero.parallel.context._ring import attend, attend_grad
from fzero.parallel.context._ring_pattern import AttentionOptions, Qkv, Ring
from fzero.parallel.context._tiled_attention import RingResult
from fzero.random import apply_mask, keep_mask_at

__all__ = ["dropout_attention", "ring_attention"]


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
        return attend(
            _make_ring(token, binding, q.device), options, Qkv(q=q, k=k, v=v, sinks=sinks, documents=documents)
        )

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
        f, values = partial(_attend_values, *ctx.axis, documents), _without_none(values)
        return torch.func.jvp(f, values, _zeros_for_none(tangents[3:], values))[1], None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _call_under_vmap(_Attention, _attend_flat, info.batch_size, in_dims, *inputs)


class _AttentionGrad(torch.autograd.Function):
    """The gradients of q, k, v and sinks. They are functions of these and `grad`: the rest saves work."""

    @staticmethod
    def forward(
        token: torch.Tensor, binding: Binding, options: AttentionOptions, grad: torch.Tensor, *saved: Any
    ) -> Any:
        return _attend_grad_flat(_make_ring(token, binding, grad.device), options, grad, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis = inputs[:3]
        ctx.save_for_backward(*inputs[3:9])
        ctx.save_for_forward(*inputs[3:9])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *values, documents = ctx.saved_tensors
        f = partial(_value_grads, *ctx.axis, documents)
        value_grads = torch.func.vjp(f, *_without_none(values))[1](grads)
        return None, None, None, *value_grads, *[None] * (8 - len(value_grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *values, documents = ctx.saved_tensors
        f, values = partial(_value_grads, *ctx.axis, documents), _without_none(values)
        return torch.func.jvp(f, values, _zeros_for_none(tangents[3:], values))[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _call_under_vmap(_AttentionGrad, _attend_grad_flat, info.batch_size, in_dims, *inputs)


def _make_ring(token: torch.Tensor, binding: Binding, device: torch.device) -> Ring:
    return Ring(token, binding, index_on(device, token, binding))


def _attend_flat(ring: Ring, options: AttentionOptions, *qkv: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(ring, options, Qkv(*qkv))


def _attend_grad_flat(
    ring: Ring, options: AttentionOptions, grad: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor, ...]:
    *qkv, out, log_sum = saved
    return attend_grad(ring, options, Qkv(*qkv), RingResult(grad, out, log_sum))


def _call_under_vmap(
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
    rows = [None if x is None else move_to_front(x, d, n) for x, d in zip(xs, in_dims[3:], strict=True)]
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


def _attend_by_definition(
    ring: Ring, options: AttentionOptions, qkv: Qkv, dropout: _Dropout | None = None
) -> torch.Tensor:
    """Attend by the definition, to gathered keys and with all weights in memory.

    It serves derivatives of higher orders, and dropout, whose mask is that of the weights `[.., h, T, T]` of whole
    sequences: it depends on the key and not on the ranks.
    """

    def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
        (x,) = apply(ring.token, "all_gather", ring.binding, DimOptions(dim), x)
        return from_rank_order(x, ring.size, dim)

    q, k, v, sinks, documents = qkv
    t, size, groups = q.shape[-2], ring.size, q.shape[-3] // k.shape[-3]
    queries, keys = compute_positions(ring.index, size, t), torch.arange(t * size, device=q.device)
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


def _attend_values(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    *values: torch.Tensor,
) -> torch.Tensor:
    """Attend by the definition, as a function of q, k, v and sinks, if there are any."""
    qkv = Qkv(*values)._replace(documents=documents)
    return _attend_by_definition(_make_ring(token, binding, qkv.q.device), options, qkv)


def _value_grads(
    token: torch.Tensor,
    binding: Binding,
    options: AttentionOptions,
    documents: torch.Tensor | None,
    grad: torch.Tensor,
    *values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v and sinks, if there are any."""
    return torch.func.vjp(partial(_attend_values, token, binding, options, documents), *values)[1](grad)


def _without_none(values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple([x for x in values if x is not None])  # the last of them, the sinks, may be missing


def _zeros_for_none(
    tangents: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return tuple([torch.zeros_like(x) if t is None else t for x, t in zip(values, tangents, strict=False)])


@allow_in_graph  # as collectives/_table.py has it
def _apply_attention(
    token: torch.Tensor, binding: Binding, options: AttentionOptions, *qkv: torch.Tensor | None
) -> torch.Tensor:
    return _Attention.apply(token, binding, options, *qkv)[0]


def dropout_attention(
    axis: Axis, options: AttentionOptions, qkv: Qkv, dropout: float, key: torch.Tensor
) -> torch.Tensor:
    """Attend as `ring_attention` does, and drop weights by a key."""
    return _attend_by_definition(
        _make_ring(axis.token, axis.binding, qkv.q.device), options, qkv, _Dropout(dropout, key)
    )


def ring_attention(axis: Axis, options: AttentionOptions, qkv: Qkv) -> torch.Tensor:
    """Attend from this rank's queries to the keys of all ranks of an axis.

    Args:
        axis: the axis; `NO_AXIS` for this rank's keys alone.
        options: which tokens attend to which, the scale and the cap.
        qkv: this rank's tokens in the order of `positions`.

    Returns:
        `[.., h, t, e]`.
    """
    return _apply_attention(axis.token, axis.binding, options, *qkv)
