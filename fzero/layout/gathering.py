"""One unit's leaves from its shard: by an all_gather, or for nothing where the leaves it was cut from are at hand."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import allow_in_graph, raise_priority
from fzero.axes.axis import Axis, Binding
from fzero.axes.scope import joint
from fzero.layout.boxes import Shard
from fzero.layout.rows import apply_over_unit_axes
from fzero.layout.spec import facts, unit_axes

__all__ = ["gather_unit"]


class _Remembered(torch.autograd.Function):
    """Stands for the gather of a shard whose whole leaves are at hand: hands them out, differentiates as gather.

    The gradient of the leaves goes to the shard; to return the leaves plainly would make it zero.
    """

    @staticmethod
    def forward(uid: int, bindings: tuple[Binding, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in rest[len(bindings) :]])  # after the axes' tokens: the leaves

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.uid, ctx.bindings, ctx.count = inputs[0], inputs[1], len(inputs)
        ctx.tokens = inputs[3 : 3 + len(ctx.bindings)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (shard,) = apply_over_unit_axes("reduce_scatter", _axes(ctx), ctx.uid, grads)
        return (None, None, shard, *[None] * (ctx.count - 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(apply_over_unit_axes("gather", _axes(ctx), ctx.uid, [tangents[2]]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, uid: int, bindings: tuple[Binding, ...], shard: Any, *rest: Any) -> Any:
        m = len(bindings)
        return tuple([x.view_as(x) for x in rest[m:]]), tuple(in_dims[3 + m :])


def _axes(ctx: Any) -> list[Axis]:
    return [Axis.of(binding, token) for binding, token in zip(ctx.bindings, ctx.tokens, strict=True)]


@allow_in_graph
def _remembered(uid: int, bindings: tuple[Binding, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
    return _Remembered.apply(uid, bindings, shard, *rest)


def gather_unit(uid: int, data: torch.Tensor, origin: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Return the leaves of a unit, differentiably in its shard `[k]`.

    With `origin`, the leaves that the shard is known to be cut from, nothing is communicated in the forward pass.
    """
    axes = joint(unit_axes(uid))
    if data.shape != (facts(uid).shard_numel,):
        raise ValueError(
            f"{Shard(data, uid)!r} holds a tensor {list(data.shape)}, and its spec says {[facts(uid).shard_numel]}; "
            "only a tree with the layout of the parameters can be gathered"
        )
    if origin is None:
        leaves = apply_over_unit_axes("gather", axes, uid, [data])
    else:
        leaves = _remembered(uid, tuple([a.binding for a in axes]), data, *[a.token for a in axes], *origin)
    raise_priority(leaves[0])
    return leaves
