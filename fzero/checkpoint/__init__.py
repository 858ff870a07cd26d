"""Checkpoints: what a rank holds of each leaf is a range of it, so a layout is a file format, and any loads as any."""

from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._folder import Checkpoints, checkpoints
from fzero.checkpoint._load import load
from fzero.checkpoint._look import leaves, read, verify
from fzero.checkpoint._save import Saving, save

__all__ = ["CheckpointError", "Checkpoints", "Saving", "checkpoints", "leaves", "load", "read", "save", "verify"]
