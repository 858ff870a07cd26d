"""Models by name: their sizes, the least that their steps take, and a train step of each configuration."""

from fzero.tuning.models._axis_sizes import largest_sizes, powers_of_two, usable_sizes
from fzero.tuning.models._bounds import Bounds
from fzero.tuning.models._model_names import TENSOR, ModelShape, init
from fzero.tuning.models._presets import PRESETS, model_shape
from fzero.tuning.models._steps import ModelStep, model_step

__all__ = [
    "PRESETS",
    "TENSOR",
    "Bounds",
    "ModelShape",
    "ModelStep",
    "init",
    "largest_sizes",
    "model_shape",
    "model_step",
    "powers_of_two",
    "usable_sizes",
]
