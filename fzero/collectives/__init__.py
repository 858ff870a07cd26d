"""Collectives: linear maps over ranks, each a row of one table with its transpose."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.collectives import gloo
from fzero.collectives._check_copies import DeferredCheck, check_copies
from fzero.collectives._invariant import all_gather_invariant, mark_invariant, psum_invariant, pvary
from fzero.collectives._messages import receive, send
from fzero.collectives._moves import all_to_all, broadcast, group_all_to_all, ppermute
from fzero.collectives._record import CollectiveEvent, CollectiveLog, record
from fzero.collectives._spaces import start_to_host, to_device, to_host, wait_to_host
from fzero.collectives._stage_messages import StageMessages
from fzero.collectives._sums import (
    ALL_GATHER,
    REDUCE_SCATTER,
    all_gather,
    check_dim,
    group_all_gather,
    group_psum,
    group_psum_scatter,
    own_part,
    pmean,
    psum,
    psum_scatter,
    start_all_gather,
    start_psum,
    wait_tensor,
)
from fzero.collectives._table import (
    COPIES,
    NO_AXIS,
    AssignmentOptions,
    DimOptions,
    LinearMap,
    NoOptions,
    PermutationOptions,
    RankOperation,
    UnitOptions,
    UnitPartOptions,
    UnitSumOptions,
    add_rows,
    apply,
    apply_along,
    apply_stacked,
    mapped_binding,
    move_to_front,
    transposed_name,
)
from fzero.collectives.gloo import PendingMessages

__all__ = [
    "CollectiveEvent",
    "CollectiveLog",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "broadcast",
    "pmean",
    "ppermute",
    "psum",
    "psum_invariant",
    "psum_scatter",
    "pvary",
    "receive",
    "record",
    "send",
    "to_device",
    "to_host",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "ALL_GATHER",
    "COPIES",
    "NO_AXIS",
    "REDUCE_SCATTER",
    "AssignmentOptions",
    "DeferredCheck",
    "DimOptions",
    "LinearMap",
    "NoOptions",
    "PendingMessages",
    "PermutationOptions",
    "RankOperation",
    "StageMessages",
    "UnitOptions",
    "UnitPartOptions",
    "UnitSumOptions",
    "add_rows",
    "apply",
    "apply_along",
    "apply_stacked",
    "check_copies",
    "check_dim",
    "gloo",
    "group_all_gather",
    "group_all_to_all",
    "group_psum",
    "group_psum_scatter",
    "mapped_binding",
    "mark_invariant",
    "move_to_front",
    "own_part",
    "start_all_gather",
    "start_psum",
    "start_to_host",
    "transposed_name",
    "wait_tensor",
    "wait_to_host",
]

_FOREIGN_NAMES = {  # names of other libraries
    "all_reduce": "fzero.collectives.psum",
    "reduce_scatter": "fzero.collectives.psum_scatter",
    "pbroadcast": "fzero.collectives.pvary",
    "pswapaxes": "fzero.collectives.all_to_all",
    "axis_index": "fzero.axes.axis_index",
    "axis_size": "fzero.axes.axis_size",
    "all_to_all_single": "fzero.collectives.all_to_all",
    "batch_isend_irecv": "fzero.collectives.ppermute",
    "reduce_scatter_tensor": "fzero.collectives.psum_scatter",
    "all_gather_into_tensor": "fzero.collectives.all_gather",
    "pmax": "fzero.collectives.all_gather, and then amax over the ranks",
    "pmin": "fzero.collectives.all_gather, and then amin over the ranks",
    "pcast": "not needed: only results of a program are varying, in a PerRank",
    "barrier": "not needed: a collective waits for its ranks",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
