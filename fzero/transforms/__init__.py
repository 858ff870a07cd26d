"""The transforms over trees: partition, gather, reduce_scatter, step; `shard`, which composes them; and `remat`."""

from fzero.transforms._gather import gather
from fzero.transforms._loss_scale import scaled_value_and_grad
from fzero.transforms._partition import partition
from fzero.transforms._reduce_scatter import reduce_scatter
from fzero.transforms._remat import remat
from fzero.transforms._shard import shard
from fzero.transforms._sharded_step import Layout, ShardedStep
from fzero.transforms._step import step
from fzero.transforms._value_and_grad import value_and_grad

__all__ = [
    "Layout",
    "ShardedStep",
    "gather",
    "partition",
    "reduce_scatter",
    "remat",
    "scaled_value_and_grad",
    "shard",
    "step",
    "value_and_grad",
]
