"""One rank of a world whose other ranks do not exist, as far as memory and its own work go.

torch's "fake" backend sends nothing: what would arrive is whatever lies in the buffer. So the numbers that are trained
mean nothing; the bytes that are allocated, and the operations that run, are those of a real rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

import fzero
from fzero import tree
from fzero.graph import _agree
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box

__all__ = ["alone", "state_of"]


@contextmanager
def alone(ranks: int) -> Iterator[fzero.ranks.Mesh]:
    """Make this process rank 0 of `ranks`, on an axis "dp"."""
    gather = _agree.gather_texts
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    _agree.gather_texts = lambda mine, mesh, topic: (
        [mine] * mesh.size
    )  # the ranks that do not exist trace the same step
    try:
        yield fzero.mesh(simulate=False, dp=ranks)
    finally:
        _agree.gather_texts = gather
        dist.destroy_process_group()


def state_of(step: fzero.zero.ShardedStep, params: Any, opt: Any) -> list[Any]:
    """Make what this rank holds, `[params, opt_state]`: cut in a simulation, which needs all ranks' for a moment."""

    def first(x: Any) -> Any:
        return Shard(x.data[0].clone(), x.spec_id) if isinstance(x, Shard) else x

    simulated = step._on(fzero.mesh(simulate=True, dp=step.mesh.size))
    return [tree.map(first, x, is_leaf=is_box) for x in simulated.init(params, opt)]
