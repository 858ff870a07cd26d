"""Tensor, expert and pipeline parallelism, and the schedules of pipelines."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # other rooms import schedules, and the rest import those rooms; so each is imported where it is used
    from fzero.parallel import experts, pipeline, schedules, tensor

__all__ = ["experts", "pipeline", "schedules", "tensor"]


def __getattr__(name: str) -> Any:
    """Import a folder at its first use."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
