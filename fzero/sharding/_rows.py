"""The rows of the table of collectives for units: each shards, gathers or sums a whole unit by one collective."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange

from fzero._torch import allow_in_graph, raise_priority
from fzero.axes import Axis, Binding, joint
from fzero.collectives import (
    NO_AXIS,
    Along,
    LinearMap,
    OfUnit,
    Tensors,
    add_row,
    apply,
    group_all_gather,
    group_psum,
    group_psum_scatter,
    stacked_gather,
    stacked_scatter,
)
from fzero.sharding import _flat
from fzero.sharding._boxes import Shard
from fzero.sharding._spec import Spec, spec_info, spec_of, unit_axes

__all__ = ["apply_over_unit_axes", "apply_to_unit", "gather_flat", "gather_unit"]

# Linear maps of whole units: rows of the table of collectives.
#
# | row | forward | transpose |
# | --- | --- | --- |
# | gather | shards to leaves | reduce_scatter |
# | partition | replicated leaves to the rank's shard | pad: the rank's part, and zeros elsewhere |
# | all_reduce | the ranks' leaves to their sum | itself |
#
# The stacked form of a row computes for all ranks of a simulation at once, the local form for one rank of a process
# group. A unit may be sharded over several axes: the slowest axis divides the unit, the other axes its shards.


def _spec(options: OfUnit) -> Spec:
    return spec_of(options.spec_id)


def _unit(options: OfUnit) -> str:
    return _spec(options).unit


def _summed_dtype(options: OfUnit, x: torch.Tensor) -> torch.dtype:
    return _flat.wire_dtype(_spec(options), x)


# ---------------------------------------------------------------- gather and reduce_scatter


def _narrow(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a shard to the dtype in which it is gathered. The row casts, so that the gradient can have another dtype."""
    return x.to(_flat.gathered_dtype(spec, x))


def _stacked_gather(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return _flat.unpack(spec, rearrange(_narrow(spec, xs[0]), "n ... k -> ... (n k)"))


def _local_gather(binding: Binding, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return _flat.unpack(spec, group_all_gather(_narrow(spec, xs[0]), binding, -1))


add_row(
    LinearMap(
        name="gather",
        wire="all_gather",
        stacked=_stacked_gather,
        local=_local_gather,
        transpose="reduce_scatter",
        replicated=True,
        unit=_unit,
        wire_dtype=lambda options, x: _flat.gathered_dtype(_spec(options), x),
    )
)


def _stacked_reduce_scatter(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    summed = _flat.pack(spec, [x.sum(0, dtype=_flat.wire_dtype(spec, x)) for x in xs])
    return [rearrange(_flat.to_gradient_dtype(spec, summed), "... (n k) -> n ... k", n=n)]


def _local_reduce_scatter(binding: Binding, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    buffer = _flat.pack(spec, xs)
    summed = group_psum_scatter(buffer.to(_flat.wire_dtype(spec, buffer)), binding, -1)
    return [_flat.to_gradient_dtype(spec, summed)]


add_row(
    LinearMap(
        name="reduce_scatter",
        wire="reduce_scatter",
        stacked=_stacked_reduce_scatter,
        local=_local_reduce_scatter,
        transpose="gather",
        replicated=False,
        unit=_unit,
        wire_dtype=_summed_dtype,
    )
)


# The same for a unit that stays flat: between steps of stages 0 to 2, a box holds a full split unit.

add_row(
    LinearMap(
        name="gather_flat",
        wire="all_gather",
        stacked=lambda n, options, xs: stacked_gather(n, Along(-1), xs),
        local=lambda binding, options, xs: [group_all_gather(xs[0], binding, -1)],
        transpose="reduce_scatter_flat",
        replicated=True,
        unit=_unit,
    )
)
add_row(
    LinearMap(
        name="reduce_scatter_flat",
        wire="reduce_scatter",
        stacked=lambda n, options, xs: stacked_scatter(n, Along(-1), xs),
        local=lambda binding, options, xs: [group_psum_scatter(xs[0], binding, -1)],
        transpose="gather_flat",
        replicated=False,
        unit=_unit,
    )
)


# ---------------------------------------------------------------- partition and pad


def _stacked_partition(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    parts = rearrange(_flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n)  # [n parts, n ranks, .., k]
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _uniform_partition(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    return [rearrange(_flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n)]


def _stacked_pad(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    parts = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=-2)  # [n ranks, .., n parts, k]
    return _flat.unpack(_spec(options), parts.flatten(-2))


add_row(
    LinearMap(
        name="partition",
        wire="",
        stacked=_stacked_partition,
        uniform=_uniform_partition,
        local=lambda binding, options, xs: [_flat.own_range(_spec(options), xs, binding.rank, binding.size)],
        transpose="pad",
        replicated=False,
    )
)
add_row(
    LinearMap(
        name="pad",
        wire="",
        stacked=_stacked_pad,
        local=lambda binding, options, xs: _flat.pad_own(_spec(options), xs[0], binding.rank),
        transpose="partition",
        replicated=False,
    )
)


# ---------------------------------------------------------------- all_reduce

# Each rank uses its copy of a replicated value: as a joint map over the ranks, this is the identity. So the gradient is
# summed over ranks afterwards, and not in a Function's backward, where a gradient of a gradient would sum it twice.


def _stacked_sum(n: int, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return [_flat.to_gradient_dtype(spec, x.sum(0, dtype=_flat.wire_dtype(spec, x))) for x in xs]


def _local_sum(spec: Spec, x: torch.Tensor, binding: Binding) -> torch.Tensor:
    return _flat.to_gradient_dtype(spec, group_psum(x.to(_flat.wire_dtype(spec, x)), binding))


def _local_all_reduce(binding: Binding, options: OfUnit, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return _flat.unpack(spec, _local_sum(spec, _flat.pack(spec, xs, padded=False), binding))


add_row(
    LinearMap(
        name="all_reduce",
        wire="all_reduce",
        stacked=_stacked_sum,
        local=_local_all_reduce,
        transpose="all_reduce",
        replicated=True,
        unit=_unit,
        wire_dtype=_summed_dtype,
    )
)
add_row(
    LinearMap(
        name="all_reduce_shard",
        wire="all_reduce",
        stacked=_stacked_sum,
        local=lambda binding, options, xs: [_local_sum(_spec(options), xs[0], binding)],
        transpose="all_reduce_shard",
        replicated=True,
        unit=_unit,
        wire_dtype=_summed_dtype,
    )
)


# ---------------------------------------------------------------- over several axes, one after the other

# After the slowest axis the unit is one tensor [k]. These rows of single tensors do the same for it.
_OF_SHARDS = {"reduce_scatter": "psum_scatter", "partition": "own_part", "pad": "own_part_padded"}


def apply_over_unit_axes(name: str, axes: Sequence[Axis], spec_id: int, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row over several axes in turn: the slowest axis divides the unit, the other axes its shards."""
    first, *rest = axes or [NO_AXIS]
    if name == "gather":  # the inverse: the slowest axis last
        for a in rest[::-1]:
            xs = apply(a.token, "all_gather", a.binding, Along(-1), *xs)
        return apply(first.token, name, first.binding, OfUnit(spec_id), *xs)
    xs = apply(first.token, name, first.binding, OfUnit(spec_id), *xs)
    for a in rest:
        options = Along(-1) if name in _OF_SHARDS else OfUnit(spec_id)
        xs = apply(a.token, _OF_SHARDS.get(name, name), a.binding, options, *xs)
    return tuple(xs)


def gather_flat(spec_id: int, shard: torch.Tensor) -> torch.Tensor:
    """Gather a unit's shards `[k]` over the unit's axes into one flat tensor `[numel]`."""
    for a in reversed(joint(unit_axes(spec_id))):
        (shard,) = apply(a.token, "gather_flat", a.binding, OfUnit(spec_id), shard)
    return shard[: spec_info(spec_id).numel]


def apply_to_unit(name: str, spec_id: int, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row of the table to a unit's tensors, over the unit's axes."""
    return apply_over_unit_axes(name, joint(unit_axes(spec_id)), spec_id, xs)


# Return a unit's leaves from its shard: by an all_gather, or without communication if the box still has its origin.


class _GatherFromOrigin(torch.autograd.Function):
    """Replaces the gather of a shard whose full leaves still exist: returns these, and differentiates like a gather.

    The gradient of the leaves flows to the shard. If the leaves were returned directly, the shard would get none.
    """

    @staticmethod
    def forward(spec_id: int, bindings: tuple[Binding, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in rest[len(bindings) :]])  # the axes' tokens come first, then the leaves

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.spec_id, ctx.bindings, ctx.count = inputs[0], inputs[1], len(inputs)
        ctx.tokens = inputs[3 : 3 + len(ctx.bindings)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (shard,) = apply_over_unit_axes("reduce_scatter", _axes(ctx), ctx.spec_id, grads)
        return (None, None, shard, *[None] * (ctx.count - 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(apply_over_unit_axes("gather", _axes(ctx), ctx.spec_id, [tangents[2]]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec_id: int, bindings: tuple[Binding, ...], shard: Any, *rest: Any) -> Any:
        m = len(bindings)
        return tuple([x.view_as(x) for x in rest[m:]]), tuple(in_dims[3 + m :])


def _axes(ctx: Any) -> list[Axis]:
    return [Axis.of(binding, token) for binding, token in zip(ctx.bindings, ctx.tokens, strict=True)]


@allow_in_graph
def _gather_from_origin(spec_id: int, bindings: tuple[Binding, ...], shard: torch.Tensor, *rest: torch.Tensor) -> Any:
    return _GatherFromOrigin.apply(spec_id, bindings, shard, *rest)


def gather_unit(spec_id: int, data: torch.Tensor, origin: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Return the leaves of a unit, differentiable with respect to its shard `[k]`.

    With `origin`, the leaves that the shard was partitioned from, the forward pass communicates nothing.
    """
    axes = joint(unit_axes(spec_id))
    if data.shape != (spec_info(spec_id).shard_numel,):
        raise ValueError(
            f"{Shard(data, spec_id)!r} holds a tensor {list(data.shape)}, and its spec says "
            f"{[spec_info(spec_id).shard_numel]}; "
            "only a tree with the layout of the parameters can be gathered"
        )
    if origin is None:
        leaves = apply_over_unit_axes("gather", axes, spec_id, [data])
    else:
        leaves = _gather_from_origin(spec_id, tuple([a.binding for a in axes]), data, *[a.token for a in axes], *origin)
    raise_priority(leaves[0])
    return leaves
