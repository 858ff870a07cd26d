"""The exceptions that users may catch."""

from fzero._donated import DonatedError
from fzero.axes import DivergedError
from fzero.checkpoint import CheckpointError
from fzero.graph import SpaceError

__all__ = ["CheckpointError", "DivergedError", "DonatedError", "SpaceError"]
