"""all_reduce: a replicated unit's gradients, summed by one collective a unit. It is its own transpose.

A replicated value that each rank uses is, as a joint map over the ranks, the identity on each rank's copy. So the sum
stands after the gradient and not in a Function's backward: a gradient of a gradient would meet it twice.
"""

from typing import Any

import torch

from fzero import flat
from fzero.collectives import Meta, Params, Row, add_row, group_psum
from fzero.spec import spec_of

__all__: list[str] = []


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
