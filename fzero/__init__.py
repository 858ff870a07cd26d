"""fzero: ZeRO, sharded data-parallel training, as pure functions on torch.func."""

from fzero import nn, optim, transforms, tree
from fzero._donated import DonatedError
from fzero._record import Log, record
from fzero.collectives import all_gather, pmean, psum, psum_scatter
from fzero.graph import Jitted, Plan, jit, plan
from fzero.layout import PerRank, Shard, Slot, default_units
from fzero.mesh import Mesh, mesh
from fzero.replicated import assume_replicated
from fzero.spec import Spec
from fzero.transforms import (
    Layout,
    ShardedStep,
    gather,
    partition,
    reduce_scatter,
    shard,
    step,
    value_and_grad,
)
from fzero.world import axis_index, axis_size

__all__ = [
    "DonatedError",
    "Jitted",
    "Layout",
    "Log",
    "Mesh",
    "PerRank",
    "Plan",
    "Shard",
    "ShardedStep",
    "Slot",
    "Spec",
    "all_gather",
    "assume_replicated",
    "axis_index",
    "axis_size",
    "default_units",
    "gather",
    "jit",
    "mesh",
    "nn",
    "optim",
    "partition",
    "plan",
    "pmean",
    "psum",
    "psum_scatter",
    "record",
    "reduce_scatter",
    "shard",
    "step",
    "transforms",
    "tree",
    "value_and_grad",
]
