"""torch.nn modules as pure functions of their parameters, and layers as functions of tensors."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.nn._apply import Apply
from fzero.nn._float8 import SCALINGS, SIZE_MULTIPLE, float8_linear
from fzero.nn._functional import Functional, functional
from fzero.nn._in_place import full_copy, functional_in_place, put_back
from fzero.nn._linear_cross_entropy import linear_cross_entropy
from fzero.nn._matmul_precision import MatmulPrecision
from fzero.nn._module_pipeline import ModulePipeline, pipeline
from fzero.nn._remat_blocks import repeated_blocks
from fzero.nn._tiled import tiled
from fzero.zero import initializer

__all__ = [
    "Apply",
    "Functional",
    "MatmulPrecision",
    "ModulePipeline",
    "float8_linear",
    "functional",
    "initializer",
    "linear_cross_entropy",
    "pipeline",
    "tiled",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "SCALINGS",
    "SIZE_MULTIPLE",
    "full_copy",
    "functional_in_place",
    "put_back",
    "repeated_blocks",
]

_FOREIGN_NAMES = {  # names of torch.nn, flax and others
    "Module": "torch.nn.Module, which fzero.nn.functional takes apart",
    "Linear": "torch.nn.Linear, which fzero.nn.functional takes apart",
    "functional_call": "fzero.nn.functional",
    "make_functional": "fzero.nn.functional",
    "checkpoint": "fzero.remat(fn), or fzero.nn.functional(module, remat=True)",
    "init": "fzero.nn.initializer(module)",
    "TiledMLP": "fzero.nn.tiled",
    "LigerFusedLinearCrossEntropyLoss": "fzero.nn.linear_cross_entropy",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
