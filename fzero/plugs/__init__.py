"""Training loops of other libraries, sharded: those of transformers and TRL, of Lightning, and of Accelerate."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero._names import missing_names
from fzero.plugs._engine import EngineOptions, make_engine
from fzero.plugs._param_groups import param_groups

if TYPE_CHECKING:
    from fzero.plugs import accelerate, lightning, transformers

__all__ = ["accelerate", "lightning", "transformers"]

# For other packages of fzero only, and for a further plug. They may change in any release.
INTERNAL = ["EngineOptions", "make_engine", "param_groups"]


def __getattr__(name: str) -> Any:
    """Import a plug at its first use, because it needs its library."""
    if name in __all__:
        return importlib.import_module(f"fzero.plugs.{name}")
    return missing_names(__name__, __all__)(name)
