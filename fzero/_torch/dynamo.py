"""Functions that torch.compile treats as one operation or as a constant; they are registered when Dynamo is imported.

Importing Dynamo takes two seconds, and a step that is not passed to torch.compile does not need it.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["allow_in_graph", "assume_constant_result"]

F = TypeVar("F", bound=Callable[..., Any])
DYNAMO = "torch._dynamo"
_ALLOWED: list[Callable[..., Any]] = []


def allow_in_graph(f: F) -> F:
    """Make Dynamo put calls of a function into its graph as one operation, instead of tracing the function."""
    if DYNAMO in sys.modules:
        sys.modules[DYNAMO].allow_in_graph(f)
    else:
        _ALLOWED.append(f)
    return f


def assume_constant_result(f: F) -> F:
    """Make Dynamo call a function while it traces, and treat the result as a constant."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  as Dynamo's decorator does
    return f


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Dynamo in its usual place, and wraps its loader in a `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Dynamo's spec, once; for other modules return None, so that other finders find them."""
        if fullname != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads Dynamo by its usual loader, and then registers the allowed functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module by its usual loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and register the allowed functions with it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for f in _ALLOWED:
            module.allow_in_graph(f)


if DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _Finder())
