"""Passes: pure functions from a flat graph to a flat graph with the same results, each in its own file."""

from fzero.graph.passes._bucket import bucket
from fzero.graph.passes._carry import carry
from fzero.graph.passes._donate import donate
from fzero.graph.passes._drop_lone_collectives import drop_lone_collectives
from fzero.graph.passes._early_move import early_move
from fzero.graph.passes._gather_into import gather_into
from fzero.graph.passes._hoist import hoist
from fzero.graph.passes._in_place import in_place
from fzero.graph.passes._keep_on_host import keep_on_host
from fzero.graph.passes._mark_fused import mark_fused
from fzero.graph.passes._recast import recast
from fzero.graph.passes._recompute import recompute
from fzero.graph.passes._regather import regather
from fzero.graph.passes._schedule import schedule
from fzero.graph.passes._slice_of_gather import slice_of_gather

__all__ = [
    "bucket",
    "carry",
    "donate",
    "drop_lone_collectives",
    "early_move",
    "gather_into",
    "hoist",
    "in_place",
    "keep_on_host",
    "mark_fused",
    "recast",
    "recompute",
    "regather",
    "schedule",
    "slice_of_gather",
]
