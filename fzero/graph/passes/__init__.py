"""Passes: pure functions from a flat graph to a flat graph with the same results."""

from fzero.graph.passes._bucket import bucket
from fzero.graph.passes._carry import carry
from fzero.graph.passes._cat_into import cat_into
from fzero.graph.passes._gather_into import gather_into, slice_of_gather
from fzero.graph.passes._hoist import hoist
from fzero.graph.passes._host_copies import keep_on_host, move_early
from fzero.graph.passes._lone_collectives import drop_lone_collectives
from fzero.graph.passes._mark_fused import mark_fused
from fzero.graph.passes._overwrite import donate, in_place
from fzero.graph.passes._recast import recast
from fzero.graph.passes._recompute import recompute
from fzero.graph.passes._regather import regather
from fzero.graph.passes._send_early import send_early
from fzero.graph.passes.scheduling import schedule

__all__ = [
    "bucket",
    "carry",
    "cat_into",
    "donate",
    "drop_lone_collectives",
    "gather_into",
    "hoist",
    "in_place",
    "keep_on_host",
    "mark_fused",
    "move_early",
    "recast",
    "recompute",
    "regather",
    "schedule",
    "send_early",
    "slice_of_gather",
]
