"""gather: shards → full leaves. One all_gather a unit; its transpose is reduce_scatter."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import allow_in_graph, raise_priority
from fzero.axes.scope import Axis, axis_names, joint
from fzero.collectives.sums import all_gather, group_all_gather
from fzero.collectives.table import Meta, Params, Row, add_row
from fzero.layout import flat
from fzero.layout.boxes import Shard, Slot, is_box
from fzero.layout.spec import fact, on_mesh, spec_of, unit_axes
from fzero.layout.units import apply_over, groups

__all__ = ["gather"]


def _narrow(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Cast a shard to the dtype that it is gathered in. In here, so that its gradient may have the shard's own."""
    return x.to(flat.gathered_dtype(spec_of(params[0]), x))


add_row(
    Row(
        name="gather",
        wire="all_gather",
        # [n, .., k] -> [.., n, k] -> [.., n k] -> leaves [.., *shape]
        stacked=lambda n, params, xs: flat.unpack(
            spec_of(params[0]), _narrow(params, xs[0]).movedim(0, params[1]).flatten(params[1]), params[1]
        ),
        local=lambda meta, params, xs: flat.unpack(
            spec_of(params[0]), group_all_gather(_narrow(params, xs[0]), meta, params[1]), params[1]
        ),
        transpose="reduce_scatter",
        replicated=True,
        shift=lambda params: (params[0], params[1] + 1),
        label=lambda params: spec_of(params[0]).unit,
        wire_dtype=lambda params, x: flat.gathered_dtype(spec_of(params[0]), x),
    )
)


class _Remembered(torch.autograd.Function):
    """Stands for the gather of a shard whose whole leaves are at hand: hands them out, differentiates as gather.

    The gradient of the leaves goes to the shard; to return the leaves plainly would make it zero.
    """

    @staticmethod
    def forward(uid: int, metas: tuple[Meta, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in rest[len(metas) :]])  # after the axes' tokens: the leaves

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.uid, ctx.metas, ctx.count = inputs[0], inputs[1], len(inputs)
        ctx.tokens = inputs[3 : 3 + len(ctx.metas)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (shard,) = apply_over("reduce_scatter", _axes(ctx), ctx.uid, grads)
        return (None, None, shard, *[None] * (ctx.count - 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(apply_over("gather", _axes(ctx), ctx.uid, [tangents[2]]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, uid: int, metas: tuple[Meta, ...], shard: Any, *rest: Any) -> Any:
        m = len(metas)
        return tuple([x.view_as(x) for x in rest[m:]]), tuple(in_dims[3 + m :])


def _axes(ctx: Any) -> list[Axis]:
    return [
        Axis(name, size, group, rank, token)
        for (name, group, size, rank, _), token in zip(ctx.metas, ctx.tokens, strict=True)
    ]


@allow_in_graph
def _remembered(uid: int, metas: tuple[Meta, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
    return _Remembered.apply(uid, metas, shard, *rest)


def gather_unit(uid: int, data: torch.Tensor, origin: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Return the leaves of a unit, differentiably in its shard `[k]`.

    With `origin`, the leaves that the shard is known to be cut from, nothing is communicated in the forward pass.
    """
    axes = joint(unit_axes(uid))
    if data.shape != (fact(uid, "shard_numel"),):
        raise ValueError(
            f"{Shard(data, uid)!r} holds a tensor {list(data.shape)}, and its spec says {[fact(uid, 'shard_numel')]}; "
            "only a tree with the layout of the parameters can be gathered"
        )
    if origin is None:
        leaves = apply_over("gather", axes, uid, [data])
    else:
        leaves = _remembered(uid, tuple([a.meta for a in axes]), data, *[a.token for a in axes], *origin)
    raise_priority(leaves[0])
    return leaves


def gather(params: Any) -> Any:
    """Gather every shard of a tree: plain leaves again, equal on all ranks that it was cut over.

    The second transform. One all_gather a unit, over the axes that it was cut over, and none for boxes that
    `partition` has just made. The leaves are views into one buffer a unit. Differentiable: the gradient arrives
    as shards, by one reduce_scatter a unit, as soon as the backward pass has the unit's last gradient. A leaf that
    is split along a further axis (tensor or expert parallel) comes out as this rank's part of it.

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


def replicate(params: Any) -> Any:
    """Gather as `gather` does, but leave units that are split in boxes: what stages 0 to 2 hold between steps."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    for uid, box, members in groups(paths, entries):
        if not fact(uid, "splits"):
            leaves = gather_unit(uid, box.data, box.origin)
            for position, index in members:
                entries[position] = leaves[index]
            continue
        whole = on_mesh(uid, (), "each", axis_names())
        for position, index in members:
            entries[position] = Slot(whole, index)
        names = tuple([a.name for a in unit_axes(uid)])
        entries[members[0][0]] = Shard(all_gather(box.data, names)[: fact(uid, "numel")], whole)
    return tree.unflatten(structure, entries)


def assemble(params: Any) -> Any:
    """Gather every shard of a tree, and every part of a split leaf: whole leaves, equal on all ranks."""
    paths, entries, structure = tree.flatten_with_paths(params, is_box)
    for uid, box, members in groups(paths, entries):
        leaves = list(gather_unit(uid, box.data, box.origin))
        for name, _, dims in reversed(fact(uid, "splits")):
            leaves = [all_gather(x, name, dim=d) for x, d in zip(leaves, dims, strict=True)]
        for position, index in members:
            entries[position] = leaves[index]
    return tree.unflatten(structure, entries)
