"""fzero: ZeRO, sharded data-parallel training, as pure functions on torch.func."""

from fzero import nn, optim, random, transforms, tree
from fzero._batch_plan import BatchPlan, batch_plan
from fzero._donated import DonatedError
from fzero._profile import Profile, profile
from fzero._record import Log, record
from fzero.collectives import all_gather, pmean, psum, psum_scatter
from fzero.exchange import all_to_all, broadcast, ppermute
from fzero.graph import Jitted, Plan, jit, plan
from fzero.invariant import all_gather_invariant, psum_invariant, pvary
from fzero.layout import PerRank, Shard, Slot
from fzero.lockstep import DivergedError
from fzero.mesh import Mesh, mesh
from fzero.precision import Precision
from fzero.replicated import assume_replicated
from fzero.spec import Spec, Split
from fzero.transforms import (
    Layout,
    ShardedStep,
    gather,
    partition,
    reduce_scatter,
    remat,
    scaled_value_and_grad,
    shard,
    step,
    value_and_grad,
)
from fzero.units import default_units
from fzero.world import axis_index, axis_names, axis_size

__all__ = [
    "BatchPlan",
    "DivergedError",
    "DonatedError",
    "Jitted",
    "Layout",
    "Log",
    "Mesh",
    "PerRank",
    "Plan",
    "Precision",
    "Profile",
    "Shard",
    "ShardedStep",
    "Slot",
    "Spec",
    "Split",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "assume_replicated",
    "axis_index",
    "axis_names",
    "axis_size",
    "batch_plan",
    "broadcast",
    "default_units",
    "gather",
    "jit",
    "mesh",
    "nn",
    "optim",
    "partition",
    "plan",
    "pmean",
    "ppermute",
    "profile",
    "psum",
    "psum_invariant",
    "psum_scatter",
    "pvary",
    "random",
    "record",
    "reduce_scatter",
    "remat",
    "scaled_value_and_grad",
    "shard",
    "step",
    "transforms",
    "tree",
    "value_and_grad",
]
