"""Collectives: linear maps over ranks, each a row of one table with its transpose."""

from fzero.collectives import gloo
from fzero.collectives._copies import DeferredCheck, check_copies
from fzero.collectives._exchange import all_to_all, broadcast, ppermute
from fzero.collectives._invariant import all_gather_invariant, mark_invariant, own_part, psum_invariant, pvary
from fzero.collectives._messages import StageMessages, receive, send
from fzero.collectives._moves import start_to_host, to_device, to_host, wait_to_host
from fzero.collectives._record import Log, record
from fzero.collectives._sums import (
    all_gather,
    dimension,
    group_all_gather,
    group_psum,
    group_psum_scatter,
    pmean,
    psum,
    psum_scatter,
    stacked_gather,
    stacked_scatter,
)
from fzero.collectives._table import (
    NO_AXIS,
    AssignmentOptions,
    DimOptions,
    LinearMap,
    NoOptions,
    Tensors,
    UnitOptions,
    add_row,
    apply,
    apply_along,
)
from fzero.collectives.gloo import PendingMessages

__all__ = [
    "NO_AXIS",
    "AssignmentOptions",
    "DeferredCheck",
    "DimOptions",
    "LinearMap",
    "Log",
    "NoOptions",
    "PendingMessages",
    "StageMessages",
    "Tensors",
    "UnitOptions",
    "add_row",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "apply",
    "apply_along",
    "broadcast",
    "check_copies",
    "dimension",
    "gloo",
    "group_all_gather",
    "group_psum",
    "group_psum_scatter",
    "mark_invariant",
    "own_part",
    "pmean",
    "ppermute",
    "psum",
    "psum_invariant",
    "psum_scatter",
    "pvary",
    "receive",
    "record",
    "send",
    "stacked_gather",
    "stacked_scatter",
    "start_to_host",
    "to_device",
    "to_host",
    "wait_to_host",
]
