"""Ranks: a mesh names them, and a rank program runs on them."""

from fzero.ranks._agreement import (
    MissingRank,
    all_gather_numbers,
    all_gather_texts,
    check_equal,
    check_same_structure,
    checksum,
    gather_texts,
)
from fzero.ranks._mesh import Mesh, device_put, mesh
from fzero.ranks._spmd import Spmd

__all__ = [
    "Mesh",
    "mesh",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "MissingRank",
    "Spmd",
    "all_gather_numbers",
    "all_gather_texts",
    "check_equal",
    "check_same_structure",
    "checksum",
    "device_put",
    "gather_texts",
]
