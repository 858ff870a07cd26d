"""fzero: ZeRO, sharded data-parallel training, as pure functions on torch.func."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero import (
    axes,
    checkpoint,
    collectives,
    data,
    errors,
    graph,
    nn,
    observe,
    optim,
    parallel,
    random,
    ranks,
    sharding,
    transforms,
    tree,
    tuning,
    zero,
)
from fzero.checkpoint import load, save
from fzero.graph import jit, plan
from fzero.observe import profile
from fzero.optim import Precision
from fzero.parallel.pipeline import pipeline
from fzero.ranks import mesh
from fzero.sharding import PerRank
from fzero.transforms import gather, partition, reduce_scatter, remat, scaled_value_and_grad, value_and_grad
from fzero.tuning import tune
from fzero.zero import evaluate, predict, shard

if TYPE_CHECKING:  # it needs hypothesis, so it is imported where it is used
    from fzero import testing as testing

__version__ = "0.2.0.dev0"

__all__ = [
    "PerRank",
    "Precision",
    "axes",
    "checkpoint",
    "collectives",
    "data",
    "errors",
    "evaluate",
    "gather",
    "graph",
    "jit",
    "load",
    "mesh",
    "nn",
    "observe",
    "optim",
    "parallel",
    "partition",
    "pipeline",
    "plan",
    "predict",
    "profile",
    "random",
    "ranks",
    "reduce_scatter",
    "remat",
    "save",
    "scaled_value_and_grad",
    "shard",
    "sharding",
    "transforms",
    "tree",
    "tune",
    "tuning",
    "value_and_grad",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("fzero.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
