"""Observations of a run: metrics, the time of a step by source line, and where a value stopped being finite."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.observe._lines import LineCost, Span, StackCost
from fzero.observe._metrics import MetricsLog, Rows, log
from fzero.observe._nonfinite import FirstCause, Nonfinite, nonfinite
from fzero.observe._profile import Cost, Profile, profile
from fzero.observe._writers import jsonl, progress, tensorboard

__all__ = [
    "Cost",
    "FirstCause",
    "LineCost",
    "MetricsLog",
    "Nonfinite",
    "Profile",
    "Rows",
    "Span",
    "StackCost",
    "jsonl",
    "log",
    "nonfinite",
    "profile",
    "progress",
    "tensorboard",
]

_FOREIGN_NAMES = {  # names of torch.profiler, JAX, wandb and TensorBoard
    "record": "fzero.observe.log(fzero.observe.progress()), a log that is called with the metrics of a step",
    "record_function": "not needed: fzero.observe.profile has the time of each source line",
    "trace": "fzero.observe.profile",
    "add_scalar": "fzero.observe.log(fzero.observe.tensorboard(folder))",
    "check_finite": "fzero.observe.nonfinite(step)",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
