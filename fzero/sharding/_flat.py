"""A unit as one flat buffer, and the rows of the table of collectives that shard, gather or sum a unit."""

import math
from functools import partial

import torch
from einops import rearrange

from fzero._torch import OneNode
from fzero._torch.types import Tensors
from fzero.axes import Binding
from fzero.collectives import (
    ALL_GATHER,
    COPIES,
    REDUCE_SCATTER,
    LinearMap,
    RankOperation,
    UnitOptions,
    add_rows,
    group_all_gather,
    group_psum,
    group_psum_scatter,
)
from fzero.sharding._spec import Spec, spec_of

__all__ = [
    "flatten_by_copies",
    "flatten_leaves",
    "flatten_unit",
    "put_elements",
    "slice_elements",
    "to_gradient_dtype",
    "view_leaves",
]

# A unit as one flat buffer: leaves to buffer, buffer to leaves, and a rank's range of the buffer.
#
# Leading dimensions, before a leaf's own or before a buffer's single one, pass through. They belong to a user's vmap
# or to the ranks of a simulation, and are written `..`.


def _leading_shape(spec: Spec, leaves: Tensors) -> tuple[int, ...]:
    """Return the shape of the leading dimensions, before the leaves' own."""
    return tuple(leaves[0].shape[: leaves[0].ndim - len(spec.shapes[0])])


def flatten_unit(spec: Spec, leaves: Tensors, padded: bool = True) -> torch.Tensor:
    """Concatenate a unit's leaves `[.., *shape]` into one buffer `[.., N k]` (without `padded`, `[.., numel]`)."""
    padding = spec.shard_numel * spec.ranks - spec.numel if padded else 0
    return flatten_leaves(list(leaves), len(_leading_shape(spec, leaves)), padding)


def view_leaves(spec: Spec, buffer: torch.Tensor) -> list[torch.Tensor]:
    """View a unit's buffer `[.., N k]` as its leaves `[.., *shape]`; no copy."""
    return view_ranges(buffer, list(spec.sizes), [list(shape) for shape in spec.shapes])


@OneNode
def flatten_leaves(leaves: list[torch.Tensor], leading: int, padding: int) -> torch.Tensor:
    """Concatenate tensors, flattened after their `leading` first dimensions, and append `padding` zeros."""
    parts = [x.reshape((*x.shape[:leading], x.shape[leading:].numel())) for x in leaves]
    if padding:
        parts.append(leaves[0].new_zeros((*leaves[0].shape[:leading], padding)))
    return torch.cat(parts, dim=leading)


def _view_by_strides(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """Do the same as `view_ranges`, on a stand-in: with one operation for each part."""
    if buffer.dim() > 1 or not buffer.is_contiguous():
        return view_ranges.f(buffer, sizes, shapes)
    at = buffer.storage_offset()
    parts: list[torch.Tensor] = []
    for size, shape in zip(sizes, shapes, strict=True):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        parts.append(buffer.as_strided(shape, strides, at))
        at += size
    return parts


@partial(OneNode, on_stand_ins=_view_by_strides)
def view_ranges(buffer: torch.Tensor, sizes: list[int], shapes: list[list[int]]) -> list[torch.Tensor]:
    """View consecutive ranges of a buffer `[.., n]` as tensors `[.., *shape]`."""
    leading_shape = buffer.shape[:-1]
    at = 0
    parts: list[torch.Tensor] = []
    for size, shape in zip(sizes, shapes, strict=True):
        parts.append(buffer.narrow(len(leading_shape), at, size).view((*leading_shape, *shape)))
        at += size
    return parts


def flatten_by_copies(leaves: list[torch.Tensor], leading: int, padding: int) -> torch.Tensor:
    """Do the same as `flatten_leaves`, on tensors that no transform tracks, with no memory besides the result's."""
    if not padding and all(x.is_contiguous() for x in leaves):
        return flatten_leaves.f(leaves, leading, padding)
    leading_shape = leaves[0].shape[:leading]
    sizes = [x.shape[leading:].numel() for x in leaves]
    buffer = leaves[0].new_empty((*leading_shape, sum(sizes) + padding))
    at = 0
    for x, size in zip(leaves, sizes, strict=True):
        buffer.narrow(leading, at, size).view(x.shape).copy_(x)
        at += size
    buffer.narrow(leading, at, padding).zero_()
    return buffer


def _own_range(spec: Spec, leaves: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """Copy one of `ranks` equal parts `[.., k]` out of a unit's leaves, in O(k): the full buffer is never built."""
    leading_shape, k = _leading_shape(spec, leaves), spec.shard_numel * spec.ranks // ranks
    start, stop = rank * k, rank * k + k
    parts = []
    for x, offset, size in zip(leaves, spec.offsets, spec.sizes, strict=False):
        first, last = max(start - offset, 0), min(stop - offset, size)
        if first < last:
            parts.append(x.reshape((*leading_shape, size)).narrow(len(leading_shape), first, last - first))
    padding = k - sum(part.shape[-1] for part in parts)
    if padding or not parts:
        parts.append(leaves[0].new_zeros((*leading_shape, padding)))
    return torch.cat(parts, dim=len(leading_shape))


def _pad_own(spec: Spec, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Put one part `[.., k]` at its offset in a unit of zeros: the transpose of `_own_range`."""
    *leading_shape, k = shard.shape
    buffer = shard.new_zeros((*leading_shape, spec.shard_numel * spec.ranks))
    buffer.narrow(len(leading_shape), rank * k, k).copy_(shard)
    return view_leaves(spec, buffer)


# ---------------------------------------------------------------- dtypes


def _gathered_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a shard is gathered: its own, or the parameters' dtype under a precision policy."""
    return x.dtype if spec.cast is None else spec.dtype


def _wire_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is summed over ranks: its own, or a precision policy's."""
    return x.dtype if spec.cast is None else spec.cast.wire


def to_gradient_dtype(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a gradient, after its sum over ranks, to the dtype that the optimizer's update receives."""
    return x if spec.cast is None else x.to(spec.cast.grad)


# Ranges of a tensor's elements in row-major order, for any strides, without a copy of the other elements.


def slice_elements(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements `[start, stop)` of a tensor, in row-major order: a tensor `[stop - start]`.

    The result is a view if the tensor is contiguous. Otherwise it copies these elements alone; `x.reshape(-1)` would
    copy all.
    """
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    parts = [part.reshape(-1) for part in _slices(x, start, stop)]
    return torch.cat(parts) if parts else x.new_empty(0)


def put_elements(x: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy `values` `[n]` into a tensor, from its element `start` on in row-major order, without any other copy."""
    at = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: full rows, and parts of rows at both ends."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first, last = -(-start // row), stop // row  # the full rows are [first, last)
    if first > last:  # all in one row
        return _slices(x[last], start - last * row, stop - last * row)
    before = _slices(x[first - 1], start - (first - 1) * row, row) if first * row > start else []
    after = _slices(x[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([x[first:last]] if first < last else []), *after]


# Linear maps of whole units: rows of the table of collectives.
#
# | row | forward | transpose |
# | --- | --- | --- |
# | gather | shards to leaves | reduce_scatter |
# | partition | replicated leaves to the rank's shard | pad: the rank's part, and zeros elsewhere |
# | all_reduce | the ranks' leaves to their sum | itself |
#
# The form `all_ranks` of a row computes for all ranks of a simulation at once, the form `local` for one rank of a
# process group. A unit may be sharded over several axes: the slowest axis divides the unit, the other axes its shards.


def _spec(options: UnitOptions) -> Spec:
    return spec_of(options.spec_id)


def _unit(options: UnitOptions) -> str:
    return _spec(options).unit


def _summed_dtype(options: UnitOptions, x: torch.Tensor) -> torch.dtype:
    return _wire_dtype(_spec(options), x)


# ---------------------------------------------------------------- gather and reduce_scatter


def _narrow(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a shard to the dtype in which it is gathered. The row casts, so that the gradient can have another dtype."""
    return x.to(_gathered_dtype(spec, x))


def _all_ranks_gather(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return view_leaves(spec, rearrange(_narrow(spec, xs[0]), "n ... k -> ... (n k)"))


def _local_gather(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return view_leaves(spec, group_all_gather(_narrow(spec, xs[0]), binding, -1))


def _all_ranks_reduce_scatter(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    summed = flatten_unit(spec, [x.sum(0, dtype=_wire_dtype(spec, x)) for x in xs])
    return [rearrange(to_gradient_dtype(spec, summed), "... (n k) -> n ... k", n=n)]


def _local_reduce_scatter(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    buffer = flatten_unit(spec, xs)
    summed = group_psum_scatter(buffer.to(_wire_dtype(spec, buffer)), binding, -1)
    return [to_gradient_dtype(spec, summed)]


# ---------------------------------------------------------------- partition and pad


def _all_ranks_partition(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    parts = rearrange(flatten_unit(_spec(options), xs), "... (n k) -> n ... k", n=n)  # [n parts, n ranks, .., k]
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _uniform_partition(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    return [rearrange(flatten_unit(_spec(options), xs), "... (n k) -> n ... k", n=n)]


def _all_ranks_pad(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    parts = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=-2)  # [n ranks, .., n parts, k]
    return view_leaves(_spec(options), parts.flatten(-2))


# ---------------------------------------------------------------- all_reduce

# Each rank uses its copy of a replicated value: as a joint map over the ranks, this is the identity. So the gradient is
# summed over ranks afterwards, and not in a Function's backward, where a gradient of a gradient would sum it twice.


def _all_ranks_sum(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return [to_gradient_dtype(spec, x.sum(0, dtype=_wire_dtype(spec, x))) for x in xs]


def _local_sum(spec: Spec, x: torch.Tensor, binding: Binding) -> torch.Tensor:
    return to_gradient_dtype(spec, group_psum(x.to(_wire_dtype(spec, x)), binding))


def _local_all_reduce(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _spec(options)
    return view_leaves(spec, _local_sum(spec, flatten_unit(spec, xs, padded=False), binding))


# ---------------------------------------------------------------- the rows

_PARTITION = RankOperation(
    "",
    all_ranks=_all_ranks_partition,
    uniform=_uniform_partition,
    local=lambda binding, options, xs: [_own_range(_spec(options), xs, binding.rank, binding.size)],
)
_PAD = RankOperation(
    "",
    all_ranks=_all_ranks_pad,
    local=lambda binding, options, xs: _pad_own(_spec(options), xs[0], binding.rank),
)
_ALL_REDUCE_SHARD = RankOperation(
    "all_reduce",
    all_ranks=_all_ranks_sum,
    local=lambda binding, options, xs: [_local_sum(_spec(options), xs[0], binding)],
)
_SUMMED = {"unit": _unit, "wire_dtype": _summed_dtype}

add_rows(
    LinearMap(
        "gather",
        RankOperation("all_gather", _all_ranks_gather, _local_gather),
        "reduce_scatter",
        output=COPIES,
        unit=_unit,
        wire_dtype=lambda options, x: _gathered_dtype(_spec(options), x),
    ),
    LinearMap(
        "reduce_scatter",
        RankOperation("reduce_scatter", _all_ranks_reduce_scatter, _local_reduce_scatter),
        "gather",
        **_SUMMED,
    ),
    # the same for a unit that stays flat: between steps of stages 0 to 2, a box holds a full split unit
    LinearMap("gather_flat", ALL_GATHER, "reduce_scatter_flat", output=COPIES, unit=_unit),
    LinearMap("reduce_scatter_flat", REDUCE_SCATTER, "gather_flat", unit=_unit),
    LinearMap("partition", _PARTITION, "pad"),
    LinearMap("pad", _PAD, "partition"),
    LinearMap(
        "all_reduce",
        RankOperation("all_reduce", _all_ranks_sum, _local_all_reduce),
        "all_reduce",
        output=COPIES,
        **_SUMMED,
    ),
    LinearMap("all_reduce_shard", _ALL_REDUCE_SHARD, "all_reduce_shard", output=COPIES, **_SUMMED),
)
