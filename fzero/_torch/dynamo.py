"""What torch.compile takes for one operation, or for a constant: said to Dynamo when it is imported, and not before.

Dynamo takes two seconds to import, and a step that nobody gives to torch.compile needs none of it.
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
    """Let Dynamo put a call of a function into its graph as it is, instead of tracing it."""
    if DYNAMO in sys.modules:
        sys.modules[DYNAMO].allow_in_graph(f)
    else:
        _ALLOWED.append(f)
    return f


def assume_constant_result(f: F) -> F:
    """Let Dynamo call a function while it traces, and take what it returns for a constant."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  what Dynamo's own decorator does
    return f


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Dynamo where it is found without this, and lets a `_Loader` load it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return Dynamo's spec, once; of other modules None, so that others find them."""
        if fullname != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and then tells it which functions are allowed."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create it as its own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run it, and tell it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        for f in _ALLOWED:
            module.allow_in_graph(f)


if DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _Finder())
