"""ZeRO: a stage is a row of a table, and a sharded step composes the transforms by this row."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.zero._bytes import state_bytes
from fzero.zero._evaluate import evaluate, predict
from fzero.zero._module_params import initializer, stand_ins
from fzero.zero._rerun import CorruptionError, Rerun
from fzero.zero._shard import shard
from fzero.zero._sharded_step import ShardedStep
from fzero.zero._stages import STAGES, StageLayouts, check_stage

__all__ = [
    "CorruptionError",
    "Rerun",
    "ShardedStep",
    "StageLayouts",
    "evaluate",
    "initializer",
    "predict",
    "shard",
    "state_bytes",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "STAGES",
    "check_stage",
    "stand_ins",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
