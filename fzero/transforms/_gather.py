"""gather: shards → full leaves. One all_gather a unit; its transpose is reduce_scatter."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import flat, tree
from fzero._torch import allow_in_graph, raise_priority
from fzero.collectives import Meta, Params, Row, add_row, apply, group_all_gather
from fzero.layout import Shard, groups, is_box
from fzero.spec import shard_numel, spec_of, unit_axis

__all__ = ["gather"]

add_row(
    Row(
        name="gather",
        wire="all_gather",
        # [n, .., k] -> [.., n, k] -> [.., n k] -> leaves [.., *shape]
        stacked=lambda n, params, xs: flat.unpack(
            spec_of(params[0]), xs[0].movedim(0, params[1]).flatten(params[1]), params[1]
        ),
        local=lambda meta, params, xs: flat.unpack(
            spec_of(params[0]), group_all_gather(xs[0], meta, params[1]), params[1]
        ),
        transpose="reduce_scatter",
        replicated=True,
        shift=lambda params: (params[0], params[1] + 1),
        label=lambda params: spec_of(params[0]).unit,
    )
)


class _Remembered(torch.autograd.Function):
    """Stands for the gather of a shard whose whole leaves are at hand: hands them out, differentiates as gather.

    The gradient of the leaves goes to the shard; to return the leaves plainly would make it zero.
    """

    @staticmethod
    def forward(token: Any, meta: Meta, params: Params, shard: torch.Tensor, *origin: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in origin])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.token, ctx.meta, ctx.params = inputs[:3]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (shard,) = apply(ctx.token, "reduce_scatter", ctx.meta, ctx.params, *grads)
        return (None, None, None, shard, *[None for _ in grads])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(apply(ctx.token, "gather", ctx.meta, ctx.params, tangents[3]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: Any, meta: Meta, params: Params, shard: Any, *origin: Any) -> Any:
        return tuple([x.view_as(x) for x in origin]), tuple(in_dims[4:])


@allow_in_graph
def _remembered(token: Any, meta: Meta, params: Params, shard: torch.Tensor, *origin: torch.Tensor) -> Any:
    return _Remembered.apply(token, meta, params, shard, *origin)


def gather_unit(uid: int, data: torch.Tensor, origin: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Return the whole leaves of a unit, differentiably in its shard `[k]`.

    With `origin`, the leaves that the shard is known to be cut from, nothing is communicated in the forward pass.
    """
    axis = unit_axis(uid)
    if data.shape != (shard_numel(uid),):
        raise ValueError(
            f"{Shard(data, uid)!r} holds a tensor {list(data.shape)}, and its spec says {[shard_numel(uid)]}; "
            "only a tree with the layout of the parameters can be gathered"
        )
    if origin is None:
        leaves = apply(axis.token, "gather", axis.meta, (uid, 0), data)
    else:
        leaves = _remembered(axis.token, axis.meta, (uid, 0), data, *origin)
    raise_priority(leaves[0])
    return leaves


def gather(params: Any) -> Any:
    """Gather every shard of a tree: plain leaves again, equal on all ranks.

    The second transform. One all_gather a unit, over the axes that it was cut over, and none for boxes that
    `partition` has just made. The leaves are views into one buffer a unit. Differentiable: the gradient arrives
    as shards, by one reduce_scatter a unit, as soon as the backward pass has the unit's last gradient.

    Args:
        params: a tree in which some leaves may be boxes; others are passed through.

    Returns:
        The tree with plain tensors.

    Raises:
        ValueError: if an axis of a box is not bound or has another size than the box was cut for, or if the tree
            does not hold whole units. Outside a rank program use `step.gather` or `mesh.spmd(fzero.gather)`.

    Example:
        >>> import fzero, torch
        >>> f = lambda params: fzero.gather(fzero.partition(params))
        >>> fzero.mesh(dp=4).spmd(f)({"w": torch.arange(3)})
        {'w': tensor([0, 1, 2])}
    """
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    for uid, box, members in groups(paths, entries):
        leaves = gather_unit(uid, box.data, box.origin)
        for position, index in members:
            entries[position] = leaves[index]
    return tree.unflatten(structure, entries)
