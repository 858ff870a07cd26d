"""all_reduce: a replicated unit's gradients, summed by one collective a unit. It is its own transpose.

A replicated value that each rank uses is, as a joint map over the ranks, the identity on each rank's copy. So the sum
stands after the gradient and not in a Function's backward: a gradient of a gradient would meet it twice.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fzero.axes.scope import Axis, joint
from fzero.collectives.sums import group_psum
from fzero.collectives.table import Meta, Params, Row, add_row
from fzero.layout import flat
from fzero.layout.spec import Spec, spec_of
from fzero.layout.units import apply_over

__all__ = ["all_reduce_shard"]


def _group_all_reduce(meta: Meta, params: Params, xs: Any) -> list[torch.Tensor]:
    spec, lead = spec_of(params[0]), params[1]
    return flat.unpack(spec, _group_sum(spec, flat.pack(spec, xs, lead, padded=False), meta), lead)


def _group_sum(spec: Spec, x: torch.Tensor, meta: Meta) -> torch.Tensor:
    return flat.reduced(spec, group_psum(x.to(flat.wire_dtype(spec, x)), meta))


def _stacked_sum(n: int, params: Params, xs: Any) -> list[torch.Tensor]:
    spec = spec_of(params[0])
    return [flat.reduced(spec, x.sum(0, dtype=flat.wire_dtype(spec, x))) for x in xs]


def _wire_dtype(params: Params, x: torch.Tensor) -> torch.dtype:
    return flat.wire_dtype(spec_of(params[0]), x)


add_row(
    Row(
        name="all_reduce",
        wire="all_reduce",
        stacked=_stacked_sum,
        local=_group_all_reduce,
        transpose="all_reduce",
        replicated=True,
        shift=lambda params: (params[0], params[1] + 1),
        label=lambda params: spec_of(params[0]).unit,
        wire_dtype=_wire_dtype,
    )
)
add_row(
    Row(
        name="all_reduce_shard",
        wire="all_reduce",
        stacked=_stacked_sum,
        local=lambda meta, params, xs: [_group_sum(spec_of(params[0]), xs[0], meta)],
        transpose="all_reduce_shard",
        replicated=True,
        label=lambda params: spec_of(params[0]).unit,
        wire_dtype=_wire_dtype,
    )
)


def all_reduce_shard(uid: int, axes: Sequence[Axis], shard: torch.Tensor) -> torch.Tensor:
    """Sum a unit's gradient shard over the axes along which the unit is replicated: hybrid sharding's second half."""
    return apply_over("all_reduce_shard", joint(axes), uid, [shard])[0] if axes else shard
