"""Maps of a unit over its axes: gathers, sums and parts, with or without a codec, and their derivatives."""

from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import allow_in_graph, raise_priority
from fzero._torch.types import Tensors
from fzero.axes import Axis, Binding, join_axes
from fzero.codecs import Codec, round_trip
from fzero.collectives import NO_AXIS, DimOptions, UnitOptions, add_rows, apply, transposed_name
from fzero.sharding._boxes import Shard
from fzero.sharding._spec import lookup_spec, traced_spec, unit_axes
from fzero.sharding.maps._coded import coded_all_reduce, coded_gather, coded_reduce_scatter
from fzero.sharding.maps._flat import flatten_unit, view_leaves
from fzero.sharding.maps._flat_rows import UNIT_ROWS

__all__ = ["apply_over_unit_axes", "apply_to_unit", "gather_flat", "gather_unit"]

add_rows(*UNIT_ROWS)

# After the slowest axis the unit is one tensor [k]. These rows of single tensors do the same for it.
_SINGLE_TENSOR_ROW = {"reduce_scatter": "reduce_scatter_shards", "partition": "own_part", "pad": "own_part_padded"}
_OF_ANY_TENSOR = ("own_part", "own_part_padded")


def apply_over_unit_axes(name: str, axes: Sequence[Axis], spec_id: int, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row over several axes in turn: the slowest axis divides the unit, the other axes its shards.

    If the spec has a codec for sums, gradients are summed by it. Copies of a shard are added without it.
    """
    spec = traced_spec(spec_id)
    sums_codes = name in ("reduce_scatter", "all_reduce") or (name == "all_reduce_shard" and not spec.axes)
    if spec.reduce_key is None or not sums_codes or not spec.numel or _is_single(axes):
        return _apply_rows(name, axes, spec_id, xs)
    return _coded_sum(name, spec_id, tuple([a.binding for a in axes]), *[a.token for a in axes], *xs)


def _is_single(axes: Sequence[Axis]) -> bool:
    """Return whether there is one rank, which sends nothing."""
    return all(a.size == 1 for a in axes)


def _apply_rows(name: str, axes: Sequence[Axis], spec_id: int, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row over several axes without a codec."""
    first_axis, *other_axes = axes or [NO_AXIS]
    if name == "gather":  # the inverse: the slowest axis last
        for a in other_axes[::-1]:
            xs = apply(a.token, "gather_shards", a.binding, UnitOptions(spec_id), *xs)
        return apply(first_axis.token, name, first_axis.binding, UnitOptions(spec_id), *xs)
    xs = apply(first_axis.token, name, first_axis.binding, UnitOptions(spec_id), *xs)
    for a in other_axes:
        row = _SINGLE_TENSOR_ROW.get(name, name)
        options = DimOptions(-1) if row in _OF_ANY_TENSOR else UnitOptions(spec_id)
        xs = apply(a.token, row, a.binding, options, *xs)
    return tuple(xs)


def gather_flat(spec_id: int, shard: torch.Tensor) -> torch.Tensor:
    """Gather a unit's shards `[k]` over the unit's axes into one flat tensor `[numel]`."""
    for a in reversed(join_axes(unit_axes(spec_id))):
        (shard,) = apply(a.token, "gather_flat", a.binding, UnitOptions(spec_id), shard)
    return shard[: traced_spec(spec_id).numel]


def apply_to_unit(name: str, spec_id: int, xs: Tensors) -> tuple[torch.Tensor, ...]:
    """Apply a row of the table to a unit's tensors, over the unit's axes."""
    return apply_over_unit_axes(name, join_axes(unit_axes(spec_id)), spec_id, xs)


# Values with the derivatives of a row. The leaves of a shard may exist already, since the shard was cut from them, or
# be decoded; a sum of gradients may be decoded. Their derivatives are those of the exact gather and of the exact sum.
class _WithRowDerivatives(torch.autograd.Function):
    """Returns values as if a row had computed them from tensors, and differentiates like that row."""

    @staticmethod
    def forward(
        name: str, spec_id: int, bindings: tuple[Binding, ...], count: int, *tensors: torch.Tensor
    ) -> Any:  # the axes' tokens come first, then the `count` tensors, then the values
        return tuple([y.view_as(y) for y in tensors[len(bindings) + count :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, ctx.spec_id, ctx.bindings, ctx.count = inputs[:4]
        ctx.tokens, ctx.values = inputs[4 : 4 + len(ctx.bindings)], len(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.name == "gather":  # sums gradients, by the spec's codec if it has one
            of_xs = apply_over_unit_axes("reduce_scatter", _context_axes(ctx), ctx.spec_id, grads)
        else:
            of_xs = _apply_rows(transposed_name(ctx.name), _context_axes(ctx), ctx.spec_id, grads)
        return (*[None] * (4 + len(ctx.bindings)), *of_xs, *[None] * ctx.values)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        first = 4 + len(ctx.bindings)
        return tuple(_apply_rows(ctx.name, _context_axes(ctx), ctx.spec_id, tangents[first : first + ctx.count]))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, name: str, spec_id: int, bindings: tuple[Binding, ...], count: int, *tensors: Any
    ) -> Any:
        first = len(bindings) + count
        return tuple([y.view_as(y) for y in tensors[first:]]), tuple(in_dims[4 + first :])


def _context_axes(ctx: Any) -> list[Axis]:
    return _bound_axes(ctx.bindings, ctx.tokens)


def _bound_axes(bindings: Sequence[Binding], tokens: Tensors) -> list[Axis]:
    return [Axis.of(binding, token) for binding, token in zip(bindings, tokens, strict=True)]


@allow_in_graph
def _gather_from_origin(spec_id: int, bindings: tuple[Binding, ...], *tensors: torch.Tensor) -> Any:
    """Return the leaves `origin` of a shard; `tensors` are the axes' tokens, the shard, and `origin`."""
    tokens, (shard, *origin) = tensors[: len(bindings)], tensors[len(bindings) :]
    key = lookup_spec(spec_id).gather_key
    if key is not None:
        origin = [round_trip(Codec(*key), x.detach()) for x in origin]
    return _WithRowDerivatives.apply("gather", spec_id, bindings, 1, *tokens, shard, *origin)


@allow_in_graph
def _coded_gather(spec_id: int, bindings: tuple[Binding, ...], *tensors: torch.Tensor) -> Any:
    """Gather a shard by the spec's codecs; `tensors` are the axes' tokens and the shard."""
    tokens, shard = tensors[:-1], tensors[-1]
    axes = _bound_axes(bindings, tokens)
    if lookup_spec(spec_id).gather_key is None:
        leaves = _apply_rows("gather", axes, spec_id, [shard.detach()])
    else:
        leaves = coded_gather(spec_id, axes, shard)
    return _WithRowDerivatives.apply("gather", spec_id, bindings, 1, *tokens, shard, *leaves)


@allow_in_graph
def _coded_sum(name: str, spec_id: int, bindings: tuple[Binding, ...], *tensors: torch.Tensor) -> Any:
    """Sum a unit's gradients by the spec's codec; `tensors` are the axes' tokens and the gradients."""
    tokens, xs = tensors[: len(bindings)], tensors[len(bindings) :]
    axes, spec = _bound_axes(bindings, tokens), lookup_spec(spec_id)
    if name == "all_reduce_shard":  # of a unit that is split and not sharded: the leaves lie in one flat tensor
        values = [flatten_unit(spec, coded_all_reduce(spec_id, axes, view_leaves(spec, xs[0])))]
    else:
        values = (coded_reduce_scatter if name == "reduce_scatter" else coded_all_reduce)(spec_id, axes, xs)
    return _WithRowDerivatives.apply(name, spec_id, bindings, len(xs), *tokens, *xs, *values)


def gather_unit(spec_id: int, data: torch.Tensor, origin: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Return the leaves of a unit, differentiable with respect to its shard `[k]`.

    With `origin`, the leaves that the shard was partitioned from, the forward pass communicates nothing. If the spec
    has a codec for gathers, the leaves are rounded by it.
    """
    axes, spec = join_axes(unit_axes(spec_id)), traced_spec(spec_id)
    if data.shape != (spec.shard_numel,):
        raise ValueError(
            f"{Shard(data, spec_id)!r} holds a tensor {list(data.shape)}, and its spec says {[spec.shard_numel]}; "
            "only a tree with the layout of the parameters can be gathered"
        )
    bindings, tokens = tuple([a.binding for a in axes]), [a.token for a in axes]
    if origin is not None:
        leaves = _gather_from_origin(spec_id, bindings, *tokens, data, *origin)
    elif (spec.gather_key or spec.reduce_key) and spec.numel:
        leaves = _coded_gather(spec_id, bindings, *tokens, data)
    else:
        leaves = _apply_rows("gather", axes, spec_id, [data])
    raise_priority(leaves[0])
    return leaves
