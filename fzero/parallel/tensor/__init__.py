"""Tensor parallelism: layers that are split over an axis, as pure functions and for modules."""

from fzero.parallel.tensor._boundaries import all_gather, along, enter, leave, scatter
from fzero.parallel.tensor._cross_entropy import check_loss_options, combine_sums, cross_entropy, take_target_logits
from fzero.parallel.tensor._functions import check_part, column, embed, row
from fzero.parallel.tensor._install import install
from fzero.parallel.tensor._layers import Layers, layers, of_block, outside
from fzero.parallel.tensor._split_rule import split_rule
from fzero.parallel.tensor._styles import divided, packed

__all__ = [
    "Layers",
    "all_gather",
    "column",
    "cross_entropy",
    "divided",
    "embed",
    "enter",
    "layers",
    "leave",
    "packed",
    "row",
    "scatter",
    "split_rule",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "along",
    "check_loss_options",
    "check_part",
    "combine_sums",
    "install",
    "of_block",
    "outside",
    "take_target_logits",
]
