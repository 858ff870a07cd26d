"""fzero: ZeRO, sharded data-parallel training, as pure functions on torch.func."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from fzero import (
    checkpoint,
    data,
    debug,
    hf,
    metrics,
    moe,
    nn,
    optim,
    pipelines,
    random,
    tp,
    transforms,
    tree,
    tuning,
    units,
)
from fzero._donated import DonatedError
from fzero.axes.lockstep import DivergedError
from fzero.axes.replicated import assume_replicated
from fzero.axes.scope import axis_index, axis_names, axis_size
from fzero.checkpoint import CheckpointError, Checkpoints, Saving, checkpoints, load, save
from fzero.collectives._record import Log, record
from fzero.collectives.exchange import all_to_all, broadcast, ppermute
from fzero.collectives.invariant import all_gather_invariant, psum_invariant, pvary
from fzero.collectives.messages import receive, send
from fzero.collectives.moves import to_device, to_host
from fzero.collectives.sums import all_gather, pmean, psum, psum_scatter
from fzero.graph._absent import plan
from fzero.graph._jit import Jitted, jit
from fzero.graph.plan._plan import Plan
from fzero.graph.spaces import SpaceError
from fzero.layout.boxes import PerRank, Shard, Slot
from fzero.layout.spec import Spec, Split
from fzero.layout.table import Layouts, layouts
from fzero.layout.units import default_units
from fzero.pipelines import Pipeline, Schedule, pipeline
from fzero.precision import Precision
from fzero.profiling import Profile, profile
from fzero.ranks._batch_plan import BatchPlan, batch_plan
from fzero.ranks.mesh import Mesh, mesh
from fzero.stages._evaluate import evaluate, predict
from fzero.stages._layouts import StageLayouts
from fzero.stages._shard import shard
from fzero.stages._sharded_step import ShardedStep
from fzero.stages._state_bytes import state_bytes
from fzero.transforms import (
    gather,
    partition,
    reduce_scatter,
    remat,
    scaled_value_and_grad,
    step,
    value_and_grad,
)
from fzero.tuning import OffloadRatio, Watched, offload_ratio, tune, watch

if TYPE_CHECKING:
    from fzero import dcp

__version__ = "0.2.0.dev0"

__all__ = [
    "BatchPlan",
    "CheckpointError",
    "Checkpoints",
    "DivergedError",
    "DonatedError",
    "Jitted",
    "Layouts",
    "Log",
    "Mesh",
    "OffloadRatio",
    "PerRank",
    "Pipeline",
    "Plan",
    "Precision",
    "Profile",
    "Saving",
    "Schedule",
    "Shard",
    "ShardedStep",
    "Slot",
    "SpaceError",
    "Spec",
    "Split",
    "StageLayouts",
    "Watched",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "assume_replicated",
    "axis_index",
    "axis_names",
    "axis_size",
    "batch_plan",
    "broadcast",
    "checkpoint",
    "checkpoints",
    "data",
    "dcp",
    "debug",
    "default_units",
    "evaluate",
    "gather",
    "hf",
    "jit",
    "layouts",
    "load",
    "mesh",
    "metrics",
    "moe",
    "nn",
    "offload_ratio",
    "optim",
    "partition",
    "pipeline",
    "pipelines",
    "plan",
    "pmean",
    "ppermute",
    "predict",
    "profile",
    "psum",
    "psum_invariant",
    "psum_scatter",
    "pvary",
    "random",
    "receive",
    "record",
    "reduce_scatter",
    "remat",
    "save",
    "scaled_value_and_grad",
    "send",
    "shard",
    "state_bytes",
    "step",
    "to_device",
    "to_host",
    "tp",
    "transforms",
    "tree",
    "tune",
    "tuning",
    "units",
    "value_and_grad",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import what takes long when it is used; return what has another name now, with a warning, until version 0.3."""
    if name == "dcp":
        return importlib.import_module("fzero.dcp")
    if name == "Layout":
        warnings.warn("fzero.Layout is fzero.StageLayouts now", DeprecationWarning, stacklevel=2)
        return StageLayouts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
