"""The full leaves of a unit, also along the axes that split them, and the way back to a rank's shard."""

from collections.abc import Sequence

import torch

from fzero.collectives import all_gather, own_part
from fzero.sharding._boxes import Shard
from fzero.sharding._spec import traced_spec
from fzero.sharding.maps import gather_unit

__all__ = ["gather_full_leaves", "own_shard", "shard_full_leaves"]


def gather_full_leaves(box: Shard) -> list[torch.Tensor]:
    """Gather a unit's full leaves from its shards, also along the axes that split them."""
    leaves = list(gather_unit(box.spec_id, box.data, box.origin))
    for split in reversed(traced_spec(box.spec_id).split):
        leaves = [all_gather(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
    return leaves


def shard_full_leaves(spec_id: int, leaves: Sequence[torch.Tensor]) -> Shard:
    """Return this rank's shard of a unit's full leaves: the inverse of `gather_full_leaves`."""
    for split in traced_spec(spec_id).split:
        leaves = [own_part(x, split.axis, dim=d) for x, d in zip(leaves, split.dims, strict=True)]
    return own_shard(spec_id, leaves)


def own_shard(spec_id: int, leaves: Sequence[torch.Tensor]) -> Shard:
    """Return this rank's shard of a unit's leaves, from a buffer of all leaves.

    `partition` reads only the leaves of this rank's shard. Then the update of another leaf would be dead code on this
    rank, and a jitted step would have a different graph on each rank.
    """
    spec = traced_spec(spec_id)
    padding = leaves[0].new_zeros(spec.shard_numel * spec.ranks - spec.numel)
    buffer = torch.cat([*[x.reshape(-1) for x in leaves], padding])  # [N k]
    return Shard(own_part(buffer, spec.axes), spec_id)
