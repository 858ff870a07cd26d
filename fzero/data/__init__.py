"""Batches by number: what a step sees is a function of its number, on any mesh."""

from fzero.data._batches import Batches, batches
from fzero.data._mean import mean
from fzero.data._once import once

__all__ = ["Batches", "batches", "mean", "once"]
