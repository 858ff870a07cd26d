"""Numbers for each element of a flat shard, from numbers for each leaf of its unit.

A unit of few leaves compares each element's position with the leaves' offsets. Compilers make vector code of that, but
not of a search and a look-up, which take ten times as long on a CPU.
"""

from collections.abc import Sequence

import torch

from fzero._torch import is_fused, tensor_on
from fzero.sharding._spec import traced_spec, unit_index

__all__ = ["materialize", "spread_leaf_values", "unit_positions"]

_SEARCH_FROM_LEAVES = 32  # leaves: from here on a search takes less time
_EAGER_SEARCH_FROM_LEAVES = 8  # the same where operations run one by one


def unit_positions(spec_id: int, device: torch.device) -> torch.Tensor:
    """Return the position in its unit of each element of this rank's shard: `[k]`, int32 where they fit, else int64."""
    spec = traced_spec(spec_id)
    k = spec.shard_numel
    dtype = torch.int32 if k * spec.ranks < 2**31 else torch.int64
    start = (unit_index(spec_id, device) * k).to(dtype)
    return start + torch.arange(k, dtype=dtype, device=device)


def spread_leaf_values(spec_id: int, positions: torch.Tensor, numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each element the number of its leaf.

    Args:
        spec_id: the unit, with m leaves.
        positions: the elements' positions in the unit.
        numbers: tensors `[m + 1]`: a number for each leaf, and one for the padding.

    Returns:
        For each of `numbers` a tensor of the shape of `positions`.
    """
    ends = traced_spec(spec_id).offsets[1:]
    if len(ends) >= (_SEARCH_FROM_LEAVES if is_fused() else _EAGER_SEARCH_FROM_LEAVES):
        bounds = tensor_on(ends, dtype=positions.dtype, device=positions.device)
        leaf = torch.bucketize(positions, bounds, out_int32=True, right=True)
        return [x.index_select(0, leaf) for x in numbers]
    numbers = [materialize(x) for x in numbers]
    out = [x[0].expand(positions.shape) for x in numbers]
    for i, end in enumerate(ends):
        is_after = positions >= end
        out = [torch.where(is_after, x[i + 1], y) for x, y in zip(numbers, out, strict=True)]
    return out


def materialize(x: torch.Tensor) -> torch.Tensor:
    """Return a small tensor `[n]` whose numbers a compiler computes once.

    Inductor would else compute a number anew wherever a loop over many elements reads it. It writes the operand of
    `as_strided` to memory first.
    """
    return x.contiguous().as_strided(x.shape, (1,)) if is_fused() else x
