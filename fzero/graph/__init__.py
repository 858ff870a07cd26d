"""The graph of a full step: tracing records it, passes order it, a plan counts its bytes, and a backend runs it."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.graph import loop
from fzero.graph._candidates import PEAK_TOLERANCE
from fzero.graph._collector import pause_collector
from fzero.graph._entry import JitOptions
from fzero.graph._jit import Jitted, jit
from fzero.graph._plan_step import StepOfRank, plan, step_of_rank
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph._step import TrainStep, as_step
from fzero.graph.ir import SpaceError, is_random, node_stand_ins, only_copies
from fzero.graph.planning import (
    KINDS,
    LIMITS,
    AllocatorPeaks,
    Hardware,
    Interval,
    Plan,
    PlanSettings,
    phase_spans,
    product_seconds,
    short_path,
    transfer_seconds,
)
from fzero.graph.run import TimedOperation, record_operations
from fzero.graph.trace import other_memory, refuse_writes_into

__all__ = [
    "AllocatorPeaks",
    "Hardware",
    "Interval",
    "JitOptions",
    "Jitted",
    "Plan",
    "ScheduleOptions",
    "SpaceError",
    "jit",
    "plan",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "KINDS",
    "LIMITS",
    "PEAK_TOLERANCE",
    "PlanSettings",
    "StepOfRank",
    "TimedOperation",
    "TrainStep",
    "as_step",
    "is_random",
    "loop",
    "node_stand_ins",
    "only_copies",
    "other_memory",
    "pause_collector",
    "phase_spans",
    "product_seconds",
    "record_operations",
    "refuse_writes_into",
    "short_path",
    "step_of_rank",
    "transfer_seconds",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
