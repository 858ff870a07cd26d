"""Numbered batches: a step's batch is a function of its number, on any mesh."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.data._batch_plan import BatchPlan, batch_plan
from fzero.data._batches import Batches, batches
from fzero.data._epoch import epoch, mean
from fzero.data._padding import Padding, padding
from fzero.data._prefetch import prefetch

__all__ = ["BatchPlan", "Batches", "Padding", "batch_plan", "batches", "epoch", "mean", "padding", "prefetch"]

_FOREIGN_NAMES = {  # names of torch's and Accelerate's loaders
    "DataLoader": "fzero.data.batches(dataset, mesh, global_batch=32)",
    "StatefulDataLoader": "fzero.data.batches(dataset, mesh, global_batch=32), whose batches have numbers",
    "DistributedSampler": "fzero.data.batches(dataset, mesh, global_batch=32)",
    "skip_first_batches": "fzero.data.batches(dataset, mesh, global_batch=32).steps(start)",
    "DataCollatorWithPadding": "fzero.data.padding(lengths, global_batch=32)",
    "prefetch_to_device": "fzero.data.prefetch(batches, mesh)",
    "default_collate": "collate= of fzero.data.batches, whose default is torch's",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
