"""Tuning: the memory and the time of a step at each setting, and the setting that fits, before anything runs."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.tuning._peer_estimates import PeerEstimate, deepspeed_zero2, deepspeed_zero3, peer_estimates
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import Configuration
from fzero.tuning._tune import BestRow, ConfigurationTable, tune
from fzero.tuning.exports import Export
from fzero.tuning.long_runs import Goodput, Reliability, goodput, save_interval
from fzero.tuning.machines import A100, A100_80GB, CPU, H100, H200, Constant, Machine, calibrate
from fzero.tuning.measurements import Hint, StepMeasurement, WatchedStep, watch
from fzero.tuning.models import Bounds, model_step
from fzero.tuning.offload import (
    OffloadCosts,
    OffloadRatio,
    OffloadWork,
    RatioTrial,
    model_work,
    offload_costs,
    offload_ratio,
    planned_work,
)
from fzero.tuning.search import SkippedConfiguration, UnplannedConfiguration

__all__ = [
    "A100",
    "A100_80GB",
    "CPU",
    "H100",
    "H200",
    "BestRow",
    "Bounds",
    "Configuration",
    "ConfigurationTable",
    "Constant",
    "Export",
    "Goodput",
    "Hint",
    "Machine",
    "OffloadCosts",
    "OffloadRatio",
    "OffloadWork",
    "PeerEstimate",
    "RatioTrial",
    "Reliability",
    "SkippedConfiguration",
    "StepMeasurement",
    "TableRow",
    "UnplannedConfiguration",
    "WatchedStep",
    "calibrate",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "goodput",
    "model_step",
    "model_work",
    "offload_costs",
    "offload_ratio",
    "peer_estimates",
    "planned_work",
    "save_interval",
    "tune",
    "watch",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
