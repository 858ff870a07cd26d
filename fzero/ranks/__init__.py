"""Ranks: a mesh names them, and a rank program runs on them."""

from fzero.ranks._agreement import (
    MissingRank,
    check_alike,
    check_equal,
    checksum,
    gather_texts,
    numbers_of_all,
    texts_of_all,
)
from fzero.ranks._mesh import Mesh, mesh
from fzero.ranks._spmd import Spmd

__all__ = [
    "Mesh",
    "MissingRank",
    "Spmd",
    "check_alike",
    "check_equal",
    "checksum",
    "gather_texts",
    "mesh",
    "numbers_of_all",
    "texts_of_all",
]
