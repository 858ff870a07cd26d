"""The exceptions that users may catch."""

from fzero._donated import DonatedError
from fzero._liveness import LostRankError
from fzero.axes import DiffersByRankError, DivergedError
from fzero.checkpoint import CheckpointError
from fzero.graph import SpaceError
from fzero.tree import LayoutError
from fzero.zero import CorruptionError

__all__ = [
    "CheckpointError",
    "CorruptionError",
    "DiffersByRankError",
    "DivergedError",
    "DonatedError",
    "LayoutError",
    "LostRankError",
    "SpaceError",
]
