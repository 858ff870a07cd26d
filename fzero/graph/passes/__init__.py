"""Passes: pure functions from a flat graph to one with the same results, each in its own file."""

from fzero.graph.passes._alone import alone
from fzero.graph.passes._bucket import bucket
from fzero.graph.passes._carry import carry
from fzero.graph.passes._donate import donate
from fzero.graph.passes._early_move import early_move
from fzero.graph.passes._gather_into import gather_into
from fzero.graph.passes._hoist import hoist
from fzero.graph.passes._in_place import in_place
from fzero.graph.passes._mark_fused import mark_fused
from fzero.graph.passes._own_part import own_part
from fzero.graph.passes._recast import recast
from fzero.graph.passes._recompute import recompute
from fzero.graph.passes._regather import regather
from fzero.graph.passes._schedule._schedule import schedule
from fzero.graph.passes._stay import stay

__all__ = [
    "alone",
    "bucket",
    "carry",
    "donate",
    "early_move",
    "gather_into",
    "hoist",
    "in_place",
    "mark_fused",
    "own_part",
    "recast",
    "recompute",
    "regather",
    "schedule",
    "stay",
]
