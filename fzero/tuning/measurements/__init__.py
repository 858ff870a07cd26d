"""Measurements of a step while it trains, beside its plan."""

from fzero.tuning.measurements._hint import Hint
from fzero.tuning.measurements._measurement import StepMeasurement
from fzero.tuning.measurements._watch import WatchedStep, watch

__all__ = ["Hint", "StepMeasurement", "WatchedStep", "watch"]
