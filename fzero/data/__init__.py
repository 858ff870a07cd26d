"""Numbered batches: a step's batch is a function of its number, on any mesh."""

from fzero.data._batch_plan import BatchPlan, batch_plan
from fzero.data._batches import Batches, batches
from fzero.data._once import mean, once
from fzero.data._padding import Padding, padding
from fzero.data._prefetch import prefetch

__all__ = ["BatchPlan", "Batches", "Padding", "batch_plan", "batches", "mean", "once", "padding", "prefetch"]
