"""Tensor parallelism: layers of which each rank along an axis has a part, as pure functions and for modules."""

from fzero.tp._boundaries import cut, enter, join, leave
from fzero.tp._cross_entropy import cross_entropy
from fzero.tp._layers import Layers, layers
from fzero.tp._linear import column, embed, row
from fzero.tp._split import split
from fzero.tp._styles import divided, packed

__all__ = [
    "Layers",
    "column",
    "cross_entropy",
    "cut",
    "divided",
    "embed",
    "enter",
    "join",
    "layers",
    "leave",
    "packed",
    "row",
    "split",
]
