"""Linear maps of whole units: rows of the table of collectives.

| row | forward | transpose |
| --- | --- | --- |
| gather | shards to leaves | reduce_scatter |
| partition | replicated leaves to the rank's shard | pad: the rank's part, and zeros elsewhere |
| all_reduce | the ranks' leaves to their sum | itself |

The function `all_ranks` of a row computes for all ranks of a simulation at once, the function `local` for one rank of a
process group. A unit may be sharded over several axes: the slowest axis divides the unit, the other axes its shards.
"""

import torch
from einops import rearrange

from fzero._torch.types import Tensors
from fzero.axes import Binding
from fzero.collectives import (
    ALL_GATHER,
    COPIES,
    REDUCE_SCATTER,
    LinearMap,
    RankOperation,
    UnitOptions,
    group_all_gather,
    group_psum,
    group_psum_scatter,
)
from fzero.sharding._spec import Spec, lookup_spec
from fzero.sharding.maps._flat import flatten_unit, own_range, pad_own, view_leaves
from fzero.sharding.maps._unit_dtypes import gathered_dtype, to_gradient_dtype, wire_dtype

__all__ = ["UNIT_ROWS"]


def _options_spec(options: UnitOptions) -> Spec:
    return lookup_spec(options.spec_id)


def _unit_name(options: UnitOptions) -> str:
    return _options_spec(options).unit


def _summed_dtype(options: UnitOptions, x: torch.Tensor) -> torch.dtype:
    return wire_dtype(_options_spec(options), x)


def _cast_to_gather(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a shard to the dtype in which it is gathered. The row casts, so that the gradient can have another dtype."""
    return x.to(gathered_dtype(spec, x))


def _all_ranks_gather(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    return view_leaves(spec, rearrange(_cast_to_gather(spec, xs[0]), "n ... k -> ... (n k)"))


def _local_gather(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    return view_leaves(spec, group_all_gather(_cast_to_gather(spec, xs[0]), binding, -1))


def _all_ranks_reduce_scatter(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    summed = flatten_unit(spec, [x.sum(0, dtype=wire_dtype(spec, x)) for x in xs])
    return [rearrange(to_gradient_dtype(spec, summed), "... (n k) -> n ... k", n=n)]


def _local_reduce_scatter(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    buffer = flatten_unit(spec, xs)
    summed = group_psum_scatter(buffer.to(wire_dtype(spec, buffer)), binding, -1)
    return [to_gradient_dtype(spec, summed)]


def _cast_all_to_gather(options: UnitOptions, xs: Tensors) -> Tensors:
    return [_cast_to_gather(_options_spec(options), x) for x in xs]


def _all_ranks_reduce_scatter_shards(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec, (x,) = _options_spec(options), xs
    summed = REDUCE_SCATTER.all_ranks(n, options, [x.to(wire_dtype(spec, x))])
    return [to_gradient_dtype(spec, y) for y in summed]


def _local_reduce_scatter_shards(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec, (x,) = _options_spec(options), xs
    summed = REDUCE_SCATTER.local(binding, options, [x.to(wire_dtype(spec, x))])
    return [to_gradient_dtype(spec, y) for y in summed]


def _all_ranks_partition(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    # [n parts, n ranks, .., k]
    parts = rearrange(flatten_unit(_options_spec(options), xs), "... (n k) -> n ... k", n=n)
    return [torch.diagonal(parts, 0, 0, 1).movedim(-1, 0)]


def _uniform_partition(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    return [rearrange(flatten_unit(_options_spec(options), xs), "... (n k) -> n ... k", n=n)]


def _all_ranks_pad(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    parts = torch.diag_embed(xs[0].movedim(0, -1), dim1=0, dim2=-2)  # [n ranks, .., n parts, k]
    return view_leaves(_options_spec(options), parts.flatten(-2))


# Each rank uses its copy of a replicated value: as a joint map over the ranks, this is the identity. So the gradient is
# summed over ranks afterwards, and not in a Function's backward, where a gradient of a gradient would sum it twice.
def _all_ranks_sum(n: int, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    return [to_gradient_dtype(spec, x.sum(0, dtype=wire_dtype(spec, x))) for x in xs]


def _local_sum(spec: Spec, x: torch.Tensor, binding: Binding) -> torch.Tensor:
    return to_gradient_dtype(spec, group_psum(x.to(wire_dtype(spec, x)), binding))


def _local_all_reduce(binding: Binding, options: UnitOptions, xs: Tensors) -> Tensors:
    spec = _options_spec(options)
    return view_leaves(spec, _local_sum(spec, flatten_unit(spec, xs, padded=False), binding))


_PARTITION = RankOperation(
    "",
    all_ranks=_all_ranks_partition,
    uniform=_uniform_partition,
    local=lambda binding, options, xs: [own_range(_options_spec(options), xs, binding.rank, binding.size)],
)
_PAD = RankOperation(
    "",
    all_ranks=_all_ranks_pad,
    local=lambda binding, options, xs: pad_own(_options_spec(options), xs[0], binding.rank),
)
_ALL_REDUCE_SHARD = RankOperation(
    "all_reduce",
    all_ranks=_all_ranks_sum,
    local=lambda binding, options, xs: [_local_sum(_options_spec(options), xs[0], binding)],
)
_SUMMED = {"unit": _unit_name, "wire_dtype": _summed_dtype}

UNIT_ROWS = (
    LinearMap(
        "gather",
        RankOperation("all_gather", _all_ranks_gather, _local_gather),
        "reduce_scatter",
        output=COPIES,
        unit=_unit_name,
        wire_dtype=lambda options, x: gathered_dtype(_options_spec(options), x),
    ),
    LinearMap(
        "reduce_scatter",
        RankOperation("reduce_scatter", _all_ranks_reduce_scatter, _local_reduce_scatter),
        "gather",
        **_SUMMED,
    ),
    # the same for a unit's further axes, over which a shard is gathered into a larger one
    LinearMap(
        "gather_shards",
        ALL_GATHER._replace(
            all_ranks=lambda n, options, xs: ALL_GATHER.all_ranks(n, options, _cast_all_to_gather(options, xs)),
            local=lambda binding, options, xs: ALL_GATHER.local(binding, options, _cast_all_to_gather(options, xs)),
        ),
        "reduce_scatter_shards",
        output=COPIES,
        unit=_unit_name,
        wire_dtype=lambda options, x: gathered_dtype(_options_spec(options), x),
    ),
    LinearMap(
        "reduce_scatter_shards",
        RankOperation("reduce_scatter", _all_ranks_reduce_scatter_shards, _local_reduce_scatter_shards),
        "gather_shards",
        **_SUMMED,
    ),
    # the same for a unit that stays flat: between steps of stages 0 to 2, a box holds a full split unit
    LinearMap("gather_flat", ALL_GATHER, "reduce_scatter_flat", output=COPIES, unit=_unit_name),
    LinearMap("reduce_scatter_flat", REDUCE_SCATTER, "gather_flat", unit=_unit_name),
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
