"""Tuning: the memory and the time of a step at each setting, and the setting that fits, before anything runs."""

from fzero.tuning._best_first import Unplanned
from fzero.tuning._bounds import Bounds
from fzero.tuning._calibrate import calibrate
from fzero.tuning._goodput import Goodput, goodput, save_interval
from fzero.tuning._hint import Hint
from fzero.tuning._machine import Constant, Machine
from fzero.tuning._measurement import StepMeasurement
from fzero.tuning._named_machines import A100, A100_80GB, CPU, H100, H200
from fzero.tuning._offload_costs import OffloadCosts, offload_costs
from fzero.tuning._offload_work import OffloadWork, model_work, planned_work
from fzero.tuning._peer_estimates import PeerEstimate, deepspeed_zero2, deepspeed_zero3, peer_estimates
from fzero.tuning._ratio import OffloadRatio, RatioTrial, offload_ratio
from fzero.tuning._row import TableRow
from fzero.tuning._search import Skipped
from fzero.tuning._search_space import Configuration
from fzero.tuning._simulated_run import Reliability
from fzero.tuning._steps import model_step
from fzero.tuning._tune import Best, Table, tune
from fzero.tuning._watch import WatchedStep, watch
from fzero.tuning.exports import Export

__all__ = [
    "A100",
    "A100_80GB",
    "CPU",
    "H100",
    "H200",
    "Best",
    "Bounds",
    "Configuration",
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
    "Skipped",
    "StepMeasurement",
    "Table",
    "TableRow",
    "Unplanned",
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
