"""The exceptions that users catch, wherever they are raised."""

from fzero._donated import DonatedError
from fzero.axes import DivergedError
from fzero.checkpoint import CheckpointError
from fzero.graph import SpaceError

__all__ = ["CheckpointError", "DivergedError", "DonatedError", "SpaceError"]
