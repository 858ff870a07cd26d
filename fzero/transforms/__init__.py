"""The transforms over trees: partition, gather, reduce_scatter, step; `value_and_grad` and `remat`."""

import warnings
from typing import Any

from fzero.transforms._gather import gather
from fzero.transforms._partition import partition
from fzero.transforms._reduce_scatter import reduce_scatter
from fzero.transforms._remat._remat import remat
from fzero.transforms._step import step
from fzero.transforms.gradients._loss_scale import scaled_value_and_grad
from fzero.transforms.gradients._value_and_grad import value_and_grad

__all__ = [
    "gather",
    "partition",
    "reduce_scatter",
    "remat",
    "scaled_value_and_grad",
    "step",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    """Return what has moved to another module, with a warning, until version 0.3."""
    moved = {"Layout": "StageLayouts", "ShardedStep": "ShardedStep", "shard": "shard"}
    if name not in moved:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import fzero

    warnings.warn(f"fzero.transforms.{name} is fzero.{moved[name]} now", DeprecationWarning, stacklevel=2)
    return getattr(fzero, moved[name])
