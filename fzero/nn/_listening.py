"""Which torch functions a function calls, and which tensors depend on others: heard from outside, by a mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.random._keys import key
from fzero.random._seeded import draw_from

__all__ = ["Calls", "Reach", "calls_of", "same_calls"]

Calls = list[Any]


class _Listening(TorchFunctionMode):
    """Takes down which torch functions are called, with numbers for tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: Calls = []
        self.kept: list[torch.Tensor] = list(known)  # alive, so that no id is used twice
        self.numbers = {id(x): i for i, x in enumerate(self.kept)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, structure = tree.flatten((args, kwargs or {}))
        made, form = tree.flatten(out)
        self.calls.append((func, structure, [self.seen(x) for x in given], form))
        for x in made:
            if isinstance(x, torch.Tensor) and id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.kept)
                self.kept.append(x)
        return out

    def seen(self, x: Any) -> Any:
        """Return a tensor's number; itself for a constant, or for a tensor that nothing is known of."""
        return ("tensor", self.numbers[id(x)]) if isinstance(x, torch.Tensor) and id(x) in self.numbers else x


def calls_of(f: Callable[..., Any], *args: Any) -> Calls | None:
    """List the torch functions that `f(*args)` calls, on stand-ins without memory; None where these do not do."""
    leaves, structure = tree.flatten(args)
    absent = {id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves if isinstance(x, torch.Tensor)}
    stand_ins = [absent.get(id(x), x) for x in leaves]
    listening = _Listening(list(absent.values()))

    def listened() -> None:
        with listening:
            out = f(*tree.unflatten(structure, stand_ins))
        listening.calls.append(listening.seen(out))

    try:
        draw_from(key(0), listened)  # draws of its own: the step's go on as if nothing had been called
    except Exception:
        return None  # data-dependent code, say
    return listening.calls


def same_calls(first: Calls | None, second: Calls | None) -> bool:
    """Return whether two lists of calls are known to be one function."""
    if first is None or second is None:
        return False
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Reach(TorchFunctionMode):
    """Finds which tensors are computed of some."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.kept = list(sources)  # alive, so that no id is used twice
        self.ids = {id(x) for x in self.kept}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self.holds(x) for x in tree.flatten((args, kwargs or {}))[0]):
            made = tree.tensors(out)
            self.kept += made
            self.ids |= {id(x) for x in made}
        return out

    def holds(self, x: Any) -> bool:
        """Return whether a value is a tensor that is one of them, or computed of one."""
        return isinstance(x, torch.Tensor) and id(x) in self.ids
