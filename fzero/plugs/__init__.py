"""Training loops of other libraries, sharded: those of transformers and TRL, of Lightning, and of Accelerate."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fzero.plugs import accelerate, lightning, transformers

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    """Import a plug at its first use, because it needs its library."""
    if name in __all__:
        return importlib.import_module(f"fzero.plugs.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
