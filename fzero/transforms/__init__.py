"""The transforms over trees: partition, gather, reduce_scatter, step; `value_and_grad` and `remat`."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.transforms._loss_scale import scaled_value_and_grad
from fzero.transforms._remat import remat
from fzero.transforms._stage_transforms import assemble, gather, partition, reduce_scatter, replicate, step
from fzero.transforms._value_and_grad import value_and_grad

__all__ = [
    "gather",
    "partition",
    "reduce_scatter",
    "remat",
    "scaled_value_and_grad",
    "step",
    "value_and_grad",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "assemble",
    "replicate",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
