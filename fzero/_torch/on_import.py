"""Registrations with modules that fzero does not import, made when another library or the user imports them.

Importing Dynamo takes two seconds, and a step that is not passed to torch.compile does not need it. On CUDA builds the
FLOP counter imports triton, which takes 0.4 s. optree takes 0.15 s, and only third-party optimizers use it.
"""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["allow_in_graph", "assume_constant_result", "register_flop_formula", "register_optree_node"]

_F = TypeVar("_F", bound=Callable[..., Any])
_REGISTRATIONS: dict[str, list[Callable[[Any], Any]]] = {}
"""Name of a module that is not imported yet -> functions of the module that register something with it."""


def _register(name: str, registration: Callable[[Any], Any]) -> None:
    """Call a function with a module now, or when the module is imported."""
    if name in sys.modules:
        registration(sys.modules[name])
        return
    _REGISTRATIONS.setdefault(name, []).append(registration)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def allow_in_graph(f: _F) -> _F:
    """Make Dynamo put calls of a function into its graph as one operation, instead of tracing the function."""
    _register("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(f))
    return f


def assume_constant_result(f: _F) -> _F:
    """Make Dynamo call a function while it traces, and treat the result as a constant."""
    f._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  as Dynamo's decorator does
    return f


def register_flop_formula(operations: Sequence[Any]) -> Callable[[_F], _F]:
    """Return a decorator that makes a function count the FLOPs of operations, also for torch's `FlopCounterMode`."""

    def register(f: _F) -> _F:
        _register("torch.utils.flop_counter", lambda counter: counter.register_flop_formula(operations)(f))
        return f

    return register


def register_optree_node(
    cls: type, flatten: Callable[[Any], tuple[tuple[Any, ...], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Register a node of optree's trees. `flatten` returns children and static data, `unflatten` takes them in turn."""

    def register(optree: Any) -> None:
        optree.register_pytree_node(cls, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)

    _register("optree", register)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules with registrations by the other finders, and wraps their loaders in a `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with registrations; for other modules None, so that other finders find them."""
        if fullname not in _REGISTRATIONS:
            return None
        other_finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next((spec for finder in other_finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _Finder()


class _Loader(importlib.abc.Loader):
    """Loads a module by its usual loader, and then makes the registrations."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module by its usual loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and make the registrations."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for registration in _REGISTRATIONS.pop(module.__name__, ()):
            registration(module)
        if not _REGISTRATIONS and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
