"""A copy of a module whose functions refer to the copy.

`copy.deepcopy` keeps a function as it is. So a forward hook that refers to a submodule, or
`self.scaled = lambda x: x * self.scale`, would go on to read the module that was copied. It would train nothing.
"""

import copy
import dis
import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from fzero._torch.modules import attributes, forward_hooks

__all__ = ["check_functions", "copy_module"]


def copy_module(module: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """Copy a module as `copy.deepcopy` does, and have its functions refer to the copy where they refer to the module.

    Args:
        module: the module.
        memo: what to put into the places of some objects, by their ids.
    """
    memo = {} if memo is None else memo
    copied = copy.deepcopy(module, memo)
    for m in copied.modules():
        for name, x in attributes(m).items():
            if (y := _follow(x, memo)) is not x:
                m.__dict__[name] = y
        for hooks in forward_hooks(m):
            hooks.update({key: _follow(hook, memo) for key, hook in hooks.items()})
    return copied


def _follow(x: Any, memo: dict[int, Any]) -> Any:
    """Return a value with copies in the places of what was copied; itself where there is nothing to replace."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, MethodType):
        own = _follow(x.__self__, memo)
        return x if own is x.__self__ else MethodType(x.__func__, own)
    if isinstance(x, functools.partial):
        parts = [x.func, x.args, x.keywords]
        new = [_follow(part, memo) for part in parts]
        return x if _same(new, parts) else functools.partial(new[0], *new[1], **new[2])
    if type(x) in (list, tuple):
        new = [_follow(y, memo) for y in x]
        return x if _same(new, x) else type(x)(new)
    if type(x) is dict:
        new = {key: _follow(y, memo) for key, y in x.items()}
        return x if _same(new.values(), x.values()) else new
    return _follow_function(x, memo) if isinstance(x, FunctionType) else x


def _follow_function(f: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(f)] = f  # a function may refer to itself
    cells = [_contents(cell) for cell in f.__closure__ or ()]
    parts = [cells, f.__defaults__, f.__kwdefaults__]
    new = [_follow(part, memo) for part in parts]
    if _same(new, parts):
        return f
    closure = tuple([CellType(*y) for y in new[0]])
    g = FunctionType(f.__code__, f.__globals__, f.__name__, new[1], closure)
    g.__dict__.update(f.__dict__)
    g.__kwdefaults__ = new[2]
    memo[id(f)] = g
    return g


def _contents(cell: CellType) -> list[Any]:
    """Return what a cell holds, in a list; an empty one if it holds nothing yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _same(xs: Any, ys: Any) -> bool:
    return all(x is y for x, y in zip(xs, ys, strict=True))


def check_functions(module: torch.nn.Module) -> None:
    """Check that no function in an attribute, or a forward hook, holds a tensor of the module or reads a global of it.

    Raises:
        ValueError: if one does. Names the function and the tensor or the global.
    """
    tensors = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}
    own = {id(m) for m in module.modules()} | tensors.keys()
    for prefix, m in module.named_modules():
        kept = [*attributes(m).values(), *[hook for hooks in forward_hooks(m) for hook in hooks.values()]]
        for f in _functions(kept, set()):
            _check_function(f, f"module {prefix!r}" if prefix else "the module", tensors, own)


def _functions(values: Any, seen: set[int]) -> Iterator[FunctionType]:
    """Find the functions in values, in containers of them, and in what these functions refer to."""
    for x in values:
        if isinstance(x, torch.Tensor | torch.nn.Module) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            yield x
            yield from _functions(_held(x), seen)
        elif isinstance(x, functools.partial):
            yield from _functions([x.func, *x.args, *x.keywords.values()], seen)
        elif type(x) in (list, tuple, dict):
            yield from _functions(x.values() if isinstance(x, dict) else x, seen)


def _held(f: FunctionType) -> list[Any]:
    cells = [x for cell in f.__closure__ or () for x in _contents(cell)]
    return [*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]


def _check_function(f: FunctionType, where: str, tensors: dict[int, str], own: set[int]) -> None:
    what = f"{where} holds the function {f.__qualname__} ({f.__code__.co_filename}:{f.__code__.co_firstlineno})"
    for x in _flat(_held(f)):
        if id(x) in tensors:
            raise ValueError(
                f"{what}, which holds {tensors[id(x)]!r} itself, so that it would not be trained through it: have the "
                "function read it from a module, such as the hook's first argument"
            )
    for name in sorted(_globals_of(f.__code__)):
        if id(f.__globals__.get(name)) in own:
            raise ValueError(
                f"{what}, which reads the global {name!r}, a part of the module, that is not the copy which apply "
                "runs: have it read the hook's first argument, or make it in a function that is given the module"
            )


def _flat(values: Any) -> Iterator[Any]:
    for x in values:
        if type(x) in (list, tuple, dict):
            yield from _flat(x.values() if isinstance(x, dict) else x)
        else:
            yield x


def _globals_of(code: CodeType) -> set[str]:
    """Name the globals that a function, and the functions in it, read."""
    inner = [_globals_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}.union(*inner)
