"""Long runs: the share of time that trains, when devices fail."""

from fzero.tuning.long_runs._goodput import Goodput, goodput, save_interval
from fzero.tuning.long_runs._simulated_run import Reliability

__all__ = ["Goodput", "Reliability", "goodput", "save_interval"]
