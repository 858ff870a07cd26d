"""broadcast: a replicated unit → used by each rank. No communication; its transpose is one all_reduce a unit."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import flat
from fzero._torch import allow_in_graph, raise_priority
from fzero.collectives import Meta, Params, Row, add_row, apply, group_psum
from fzero.spec import spec_of, unit_axis

__all__ = ["broadcast_unit"]


def _group_all_reduce(meta: Meta, params: Params, xs: Any) -> list[torch.Tensor]:
    spec, lead = spec_of(params[0]), params[1]
    return flat.unpack(spec, group_psum(flat.pack(spec, xs, lead, padded=False), meta), lead)


add_row(
    Row(
        name="all_reduce",
        wire="all_reduce",
        stacked=lambda n, params, xs: [x.sum(0) for x in xs],
        local=_group_all_reduce,
        transpose="all_reduce",
        replicated=True,
        shift=lambda params: (params[0], params[1] + 1),
        label=lambda params: spec_of(params[0]).unit,
    )
)


class _Broadcast(torch.autograd.Function):
    """Hands out a unit's leaves as they are; their gradients are summed over the ranks."""

    @staticmethod
    def forward(token: torch.Tensor, meta: Meta, params: Params, *leaves: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in leaves])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token, ctx.meta, ctx.params = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, None, *apply(ctx.token, "all_reduce", ctx.meta, ctx.params, *grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Any, meta: Meta, params: Params, *leaves: Any) -> Any:
        return tuple([x.view_as(x) for x in leaves]), tuple(in_dims[3:])


@allow_in_graph
def _broadcast(token: torch.Tensor, meta: Meta, params: Params, *leaves: torch.Tensor) -> Any:
    return _Broadcast.apply(token, meta, params, *leaves)


def broadcast_unit(uid: int, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a replicated unit's leaves, such that their gradients are reduced as soon as they all exist."""
    axis = unit_axis(uid)
    out = _broadcast(axis.token, axis.meta, (uid, 0), *leaves)
    raise_priority(out[0])
    return out
