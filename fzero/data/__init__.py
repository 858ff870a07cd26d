"""Batches by number: what a step sees is a function of its number, on any mesh."""

from fzero.data._batches import Batches, batches
from fzero.data._mean import mean
from fzero.data._once import once
from fzero.data._padding import Padding, padding

__all__ = ["Batches", "Padding", "batches", "mean", "once", "padding"]
