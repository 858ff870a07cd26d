"""Checkpoints: saving, loading and inspecting them; the formats of Hugging Face (`hf`) and of torch (`dcp`)."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero._names import missing_names
from fzero.checkpoint import hf
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._folder import Checkpoints, checkpoints
from fzero.checkpoint._inspect import leaves, read, verify
from fzero.checkpoint._load import load
from fzero.checkpoint._save import SaveHandle, save

if TYPE_CHECKING:
    from fzero.checkpoint import dcp

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "SaveHandle",
    "checkpoints",
    "dcp",
    "hf",
    "leaves",
    "load",
    "read",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import torch's format at its first use, because the import is slow."""
    if name == "dcp":
        return importlib.import_module("fzero.checkpoint.dcp")
    return missing_names(__name__, __all__)(name)
