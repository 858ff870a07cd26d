"""Mixtures of experts, as pure functions: the numbers do not depend on the mesh."""

from fzero.parallel.experts import transformers
from fzero.parallel.experts._dispatch import Positions, assign_positions, combine, dispatch
from fzero.parallel.experts._expert_split import split_rule
from fzero.parallel.experts._grouped import grouped_mm, grouped_outer
from fzero.parallel.experts._layer import Linear, layer
from fzero.parallel.experts._load_balance import balance_bias, balance_loss, expert_load, stats, z_loss
from fzero.parallel.experts._routing import Routing, jitter, route
from fzero.parallel.experts._sorted_rows import Order, sort_rows, unsort_rows
from fzero.parallel.experts.transformers import use_differentiable

__all__ = [
    "Linear",
    "Order",
    "Positions",
    "Routing",
    "assign_positions",
    "balance_bias",
    "balance_loss",
    "combine",
    "dispatch",
    "expert_load",
    "grouped_mm",
    "grouped_outer",
    "jitter",
    "layer",
    "route",
    "sort_rows",
    "split_rule",
    "stats",
    "transformers",
    "unsort_rows",
    "z_loss",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "use_differentiable",
]
