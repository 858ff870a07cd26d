"""Mixtures of experts, as pure functions: the numbers do not depend on the mesh."""

from fzero.moe import transformers
from fzero.moe._grouped import grouped_mm, grouped_outer
from fzero.moe._layer import Linear, layer
from fzero.moe._losses import balance_bias, balance_loss, load, stats, z_loss
from fzero.moe._route import Routing, jitter, route
from fzero.moe._seats import Seats, combine, dispatch, seats
from fzero.moe._sorted import Order, sort_rows, unsort_rows
from fzero.moe._split import split

__all__ = [
    "Linear",
    "Order",
    "Routing",
    "Seats",
    "balance_bias",
    "balance_loss",
    "combine",
    "dispatch",
    "grouped_mm",
    "grouped_outer",
    "jitter",
    "layer",
    "load",
    "route",
    "seats",
    "sort_rows",
    "split",
    "stats",
    "transformers",
    "unsort_rows",
    "z_loss",
]
