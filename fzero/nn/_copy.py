"""The copy of a module that `apply` runs.

`copy.deepcopy` does not copy functions. So a forward hook that refers to a submodule, or
`self.scaled = lambda x: x * self.scale`, would still read the original module, and would train nothing.
"""

import copy
import dis
import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from fzero._torch.modules import attributes, forward_hooks

__all__ = ["check_functions", "copy_module", "shared_tensors"]


def copy_module(module: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """Copy a module as `copy.deepcopy` does, and make its functions refer to the copy instead of the module.

    Args:
        module: the module.
        memo: replacements for some objects, by their ids, as `copy.deepcopy` takes them.
    """
    memo = {} if memo is None else memo
    module_copy = copy.deepcopy(module, memo)
    for m in module_copy.modules():
        for name, x in attributes(m).items():
            if (y := _copied_value(x, memo)) is not x:
                m.__dict__[name] = y
        for hooks in forward_hooks(m):
            hooks.update({key: _copied_value(hook, memo) for key, hook in hooks.items()})
    return module_copy


def shared_tensors(module: torch.nn.Module) -> dict[int, Any]:
    """List a module's tensors by their ids, so that a copy of the module, which writes to none of them, shares them."""
    return {id(x): x for x in [*module.parameters(), *module.buffers()]}


def _copied_value(x: Any, memo: dict[int, Any]) -> Any:
    """Return a value with each copied object replaced by its copy; the value itself if nothing in it was copied."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, MethodType):
        owner = _copied_value(x.__self__, memo)
        function = _copied_value(x.__func__, memo)  # `forward` may be replaced by a closure
        return x if owner is x.__self__ and function is x.__func__ else MethodType(function, owner)
    if isinstance(x, functools.partial):
        parts = [x.func, x.args, x.keywords]
        new_parts = [_copied_value(part, memo) for part in parts]
        return x if _are_same(new_parts, parts) else functools.partial(new_parts[0], *new_parts[1], **new_parts[2])
    if type(x) in (list, tuple):
        new_parts = [_copied_value(y, memo) for y in x]
        return x if _are_same(new_parts, x) else type(x)(new_parts)
    if type(x) is dict:
        new_parts = {key: _copied_value(y, memo) for key, y in x.items()}
        return x if _are_same(new_parts.values(), x.values()) else new_parts
    return _follow_function(x, memo) if isinstance(x, FunctionType) else x


def _follow_function(f: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function whose closure and defaults refer to the copies, or the function if they refer to none."""
    memo[id(f)] = f  # a function may refer to itself
    cells = [_cell_contents(cell) for cell in f.__closure__ or ()]
    parts = [cells, f.__defaults__, f.__kwdefaults__]
    new_parts = [_copied_value(part, memo) for part in parts]
    if _are_same(new_parts, parts):
        return f
    closure = tuple([CellType(*y) for y in new_parts[0]])
    g = FunctionType(f.__code__, f.__globals__, f.__name__, new_parts[1], closure)
    g.__dict__.update(f.__dict__)
    g.__kwdefaults__ = new_parts[2]
    memo[id(f)] = g
    return g


def _cell_contents(cell: CellType) -> list[Any]:
    """Return the contents of a cell in a list, which is empty if the cell is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _are_same(xs: Any, ys: Any) -> bool:
    return all(x is y for x, y in zip(xs, ys, strict=True))


def check_functions(module: torch.nn.Module) -> None:
    """Check that no function in an attribute or forward hook holds a tensor of the module or reads it as a global.

    Raises:
        ValueError: if one does. The message names the function, and the tensor or global.
    """
    tensors = {id(x): name for name, x in [*module.named_parameters(), *module.named_buffers()]}
    part_ids = {id(m) for m in module.modules()} | tensors.keys()
    for prefix, m in module.named_modules():
        values = [*attributes(m).values(), *[hook for hooks in forward_hooks(m) for hook in hooks.values()]]
        for f in _reachable_functions(values, set()):
            _check_function(f, f"module {prefix!r}" if prefix else "the module", tensors, part_ids)


def _reachable_functions(values: Any, visited: set[int]) -> Iterator[FunctionType]:
    """Yield the functions in values, in their containers, and in the closures and defaults of these functions."""
    for x in values:
        if isinstance(x, torch.Tensor | torch.nn.Module) or id(x) in visited:
            continue
        visited.add(id(x))
        if isinstance(x, FunctionType):
            yield x
            yield from _reachable_functions(_referenced_values(x), visited)
        elif isinstance(x, functools.partial):
            yield from _reachable_functions([x.func, *x.args, *x.keywords.values()], visited)
        elif type(x) in (list, tuple, dict):
            yield from _reachable_functions(x.values() if isinstance(x, dict) else x, visited)


def _referenced_values(f: FunctionType) -> list[Any]:
    cells = [x for cell in f.__closure__ or () for x in _cell_contents(cell)]
    return [*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]


def _check_function(f: FunctionType, holder: str, tensors: dict[int, str], part_ids: set[int]) -> None:
    """Raise an error if a function refers to a tensor or a part of the module itself, which a copy cannot replace."""
    label = f"{holder} holds the function {f.__qualname__} ({f.__code__.co_filename}:{f.__code__.co_firstlineno})"
    for x in _flatten_containers(_referenced_values(f)):
        if id(x) in tensors:
            raise ValueError(
                f"{label}, which holds {tensors[id(x)]!r} itself, so the tensor would not be trained there: make the "
                "function read it from a module, such as the hook's first argument"
            )
    for name in sorted(_global_names(f.__code__)):
        if id(f.__globals__.get(name)) in part_ids:
            raise ValueError(
                f"{label}, which reads the global {name!r}, a part of the module. apply runs a copy of the module, "
                "so read the hook's first argument instead, or make the function in one that receives the module"
            )


def _flatten_containers(values: Any) -> Iterator[Any]:
    for x in values:
        if type(x) in (list, tuple, dict):
            yield from _flatten_containers(x.values() if isinstance(x, dict) else x)
        else:
            yield x


def _global_names(code: CodeType) -> set[str]:
    """Return the names of the globals that a function and its inner functions read."""
    inner = [_global_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}.union(*inner)
