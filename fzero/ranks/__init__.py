"""Ranks: a mesh names them, and a rank program runs on them."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.ranks._agreement import (
    all_gather_numbers,
    all_gather_texts,
    check_equal,
    check_same_structure,
    checksum,
    gather_texts,
)
from fzero.ranks._launch import TIMEOUT, World, connect_store, find_world
from fzero.ranks._mesh import Mesh, device_put, is_leader, mesh
from fzero.ranks._mesh_shape import check_axes, index_along
from fzero.ranks._rendezvous import MissingRankError
from fzero.ranks._spmd import Spmd

__all__ = ["Mesh", "mesh"]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "TIMEOUT",
    "MissingRankError",
    "Spmd",
    "World",
    "all_gather_numbers",
    "all_gather_texts",
    "check_axes",
    "check_equal",
    "check_same_structure",
    "checksum",
    "connect_store",
    "device_put",
    "find_world",
    "gather_texts",
    "index_along",
    "is_leader",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
