"""Tensor, expert and pipeline parallelism, and the schedules of pipelines."""

import importlib
from typing import TYPE_CHECKING, Any

from fzero._names import missing_names

if TYPE_CHECKING:  # a lower layer imports schedules, and higher layers the rest: each is imported at its first use
    from fzero.parallel import context, experts, pipeline, schedules, tensor

__all__ = ["context", "experts", "pipeline", "schedules", "tensor"]


def __getattr__(name: str) -> Any:
    """Import a folder at its first use."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    return missing_names(__name__, __all__)(name)
