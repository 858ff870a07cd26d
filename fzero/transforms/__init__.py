"""The transforms over trees: partition, gather, reduce_scatter, step; `value_and_grad` and `remat`."""

from fzero.transforms._gather import assemble, gather, replicate
from fzero.transforms._partition import partition
from fzero.transforms._reduce_scatter import reduce_scatter
from fzero.transforms._remat._remat import remat
from fzero.transforms._step import step
from fzero.transforms.gradients._loss_scale import scaled_value_and_grad
from fzero.transforms.gradients._value_and_grad import value_and_grad

__all__ = [
    "assemble",
    "gather",
    "partition",
    "reduce_scatter",
    "remat",
    "replicate",
    "scaled_value_and_grad",
    "step",
    "value_and_grad",
]
