"""The copy of a module that `apply` runs: how it is made, and what a forward pass may not write in it.

`copy.deepcopy` does not copy functions. So a forward hook that refers to a submodule, or
`self.scaled = lambda x: x * self.scale`, would still read the original module, and would train nothing.

A value in an attribute of the copy never reaches the user's module, and a replaced parameter has no gradient. So the
tensors and attributes are compared before and after a call. A written parameter is an error; written attributes are
refused or named in a notice.
"""

import copy
import dis
import functools
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fzero._notice import trouble_link, warn_once
from fzero._torch.levels import is_differentiated
from fzero._torch.modules import attributes, forward_hooks, version_of

__all__ = [
    "LeftoverCheck",
    "ModuleContents",
    "Versions",
    "check_functions",
    "check_leftovers",
    "check_writes",
    "copy_module",
    "module_states",
    "record_contents",
    "record_versions",
    "restore_modules",
    "shared_tensors",
    "tensors_in",
]


def copy_module(module: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """Copy a module as `copy.deepcopy` does, and make its functions refer to the copy instead of the module.

    Args:
        module: the module.
        memo: replacements for some objects, by their ids, as `copy.deepcopy` takes them.
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


def shared_tensors(module: torch.nn.Module) -> dict[int, Any]:
    """List a module's tensors by their ids, so that a copy of the module, which writes to none of them, shares them."""
    return {id(x): x for x in [*module.parameters(), *module.buffers()]}


def _follow(x: Any, memo: dict[int, Any]) -> Any:
    """Return a value with each copied object replaced by its copy; the value itself if nothing in it was copied."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, MethodType):
        owner, function = _follow(x.__self__, memo), _follow(x.__func__, memo)  # `forward` may be replaced by a closure
        return x if owner is x.__self__ and function is x.__func__ else MethodType(function, owner)
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
    """Return the contents of a cell in a list, which is empty if the cell is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _same(xs: Any, ys: Any) -> bool:
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
        for f in _functions(values, set()):
            _check_function(f, f"module {prefix!r}" if prefix else "the module", tensors, part_ids)


def _functions(values: Any, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions in values, in their containers, and in the closures and defaults of these functions."""
    for x in values:
        if isinstance(x, torch.Tensor | torch.nn.Module) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            yield x
            yield from _functions(_references(x), seen)
        elif isinstance(x, functools.partial):
            yield from _functions([x.func, *x.args, *x.keywords.values()], seen)
        elif type(x) in (list, tuple, dict):
            yield from _functions(x.values() if isinstance(x, dict) else x, seen)


def _references(f: FunctionType) -> list[Any]:
    cells = [x for cell in f.__closure__ or () for x in _contents(cell)]
    return [*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]


def _check_function(f: FunctionType, holder: str, tensors: dict[int, str], part_ids: set[int]) -> None:
    label = f"{holder} holds the function {f.__qualname__} ({f.__code__.co_filename}:{f.__code__.co_firstlineno})"
    for x in _flat(_references(f)):
        if id(x) in tensors:
            raise ValueError(
                f"{label}, which holds {tensors[id(x)]!r} itself, so the tensor would not be trained there: make the "
                "function read it from a module, such as the hook's first argument"
            )
    for name in sorted(_globals_of(f.__code__)):
        if id(f.__globals__.get(name)) in part_ids:
            raise ValueError(
                f"{label}, which reads the global {name!r}, a part of the module. apply runs a copy of the module, "
                "so read the hook's first argument instead, or make the function in one that receives the module"
            )


def _flat(values: Any) -> Iterator[Any]:
    for x in values:
        if type(x) in (list, tuple, dict):
            yield from _flat(x.values() if isinstance(x, dict) else x)
        else:
            yield x


def _globals_of(code: CodeType) -> set[str]:
    """Return the names of the globals that a function and its inner functions read."""
    inner = [_globals_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}.union(*inner)


CONTAINERS = (list, tuple, dict, set, deque)
PLAIN = (int, float, complex, str, bytes)  # bool is an int


# ---------------------------------------------------------------- tensors that a call receives


class Versions(NamedTuple):
    """The tensors of a call, and their version counters at its start, both by name."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int | None]


def record_versions(state: Mapping[str, torch.Tensor]) -> Versions:
    """Record the tensors of a call and their versions."""
    return Versions(dict(state), {name: version_of(x) for name, x in state.items()})


def check_writes(
    before: Versions, state: Mapping[str, torch.Tensor], params: frozenset[str], mutable: frozenset[str]
) -> None:
    """Check that a forward pass replaced no parameter, and wrote in place only into mutable buffers.

    Args:
        before: the tensors and versions before the call.
        state: the tensors after the call, by the same names.
        params: the names of the parameters, which may not be replaced.
        mutable: the names of the buffers that may be written in place.

    Raises:
        RuntimeError: if the pass wrote another tensor in place, or replaced a parameter. The message names the tensor.
    """
    for name, x in before.tensors.items():
        kind = "parameter" if name in params else "buffer"
        if name in params and state[name] is not x:
            raise RuntimeError(
                f"the module's forward pass replaced parameter {name!r}, whose gradient would be lost: use a local "
                "variable in forward, or torch.nn.utils.parametrize"
            )
        if name not in mutable and version_of(x) != before.numbers[name]:
            expected = (
                "change it in the train step, or let forward compute a new tensor"
                if name in params
                else "only persistent floating-point buffers and counters of a module in training mode may be written; "
                "others are constants"
            )
            raise RuntimeError(f"the module's forward pass wrote {kind} {name!r} in place: {expected}")


# ---------------------------------------------------------------- values that a call leaves in the module


class ModuleState(NamedTuple):
    """The attributes, parameters and buffers of a submodule before a call."""

    module: torch.nn.Module
    attributes: dict[str, object]
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def module_states(module: torch.nn.Module) -> list[ModuleState]:
    """Record the current state of a module and its submodules."""
    return [ModuleState(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]


def restore_modules(before: list[ModuleState], traced: bool) -> None:
    """Restore a module's parameters and buffers after a call. After a trace, restore all attributes too.

    `functional_call` does not restore a submodule that is registered twice. A trace leaves tensors without values in
    attributes.
    """
    for state in before:
        m = state.module
        if traced:
            m.__dict__.clear()
            m.__dict__.update(state.attributes)
        m._parameters.clear()
        m._parameters.update(state.parameters)
        m._buffers.update(state.buffers)


# ---------------------------------------------------------------- attributes


class ModuleContents(NamedTuple):
    """The contents of a module and its submodules that a call may add to or change.

    Attributes:
        tensors: by attribute, the tensors that it is or contains, by id.
        values: by attribute, its plain values, as `_plain` copies them.
        parameters: the names of the parameters.
        buffers: the buffers by name.
    """

    tensors: dict[str, dict[int, torch.Tensor]]
    values: dict[str, Any]
    parameters: set[str]
    buffers: dict[str, torch.Tensor]


def record_contents(module: torch.nn.Module) -> ModuleContents:
    """Record the contents of a module and its submodules."""
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    values: dict[str, Any] = {}
    for prefix, m in module.named_modules():
        for name, x in _stored_attributes(m).items():
            path = f"{prefix}.{name}" if prefix else name
            tensors[path] = {id(y): y for y in tensors_in(x)}
            values[path] = _plain(x, set())
    return ModuleContents(tensors, values, set(dict(module.named_parameters())), dict(module.named_buffers()))


def _stored_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return a module's attributes, except those that torch computes from its parameters at each call."""
    generated = {
        name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")
    }
    if isinstance(module, torch.nn.RNNBase):
        generated.add("_flat_weights")
    return {name: x for name, x in attributes(module).items() if name not in generated}


def tensors_in(x: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, which may be a container."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, CONTAINERS):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)


_NOT_PLAIN = object()


def _plain(x: object, seen: set[int]) -> Any:
    """Copy the numbers, strings and flags of a value, which may be a container; anything else is left out."""
    if x is None or isinstance(x, PLAIN):
        return x
    if id(x) in seen:
        return _NOT_PLAIN
    seen.add(id(x))
    if isinstance(x, SimpleNamespace) or (is_dataclass(x) and not isinstance(x, type)):
        x = vars(x)
    if isinstance(x, dict):
        copied = {key: _plain(y, seen) for key, y in x.items()}
        return {key: y for key, y in copied.items() if y is not _NOT_PLAIN}
    if isinstance(x, set):
        return {y for y in x if isinstance(y, PLAIN)}
    if isinstance(x, CONTAINERS):
        return [y for y in [_plain(y, seen) for y in x] if y is not _NOT_PLAIN]
    return _NOT_PLAIN


class LeftoverCheck(NamedTuple):
    """What a check of leftovers knows of the module and the call.

    Attributes:
        kind: the name of the module's class.
        prefix: the module's name in the user's module, which begins each path: "h.0." or "".
        ignored: patterns of the attributes that the user declared.
        is_traced: whether the call is traced, so that it will not run again.
        has_program: whether the call ran a program on the module, which may itself read the attributes.
    """

    kind: str
    prefix: str
    ignored: tuple[str, ...]
    is_traced: bool
    has_program: bool

    def is_ignored(self, name: str) -> bool:
        """Return whether the user said that nothing reads this attribute later."""
        return any(fnmatchcase(self.prefix + name, pattern) for pattern in self.ignored)


def check_leftovers(before: ModuleContents, module: torch.nn.Module, check: LeftoverCheck) -> None:
    """Refuse what a forward pass left in attributes if a later reader would miss it, and give a notice otherwise.

    Raises:
        RuntimeError: if the pass made a parameter, which would not be trained. Also if it left a tensor that depends on
            parameters, or, in a trace, changed a plain value. The message names the attribute.
    """
    after = record_contents(module)
    for name in sorted(after.parameters - before.parameters):
        raise RuntimeError(
            f"{check.kind}'s forward pass made parameter {name!r}, which would not be trained: make it in the "
            "constructor, or run the module once on a batch before fzero.nn.functional(module)"
        )
    left = {
        name: [x for at, x in xs.items() if at not in before.tensors.get(name, {})]
        for name, xs in after.tensors.items()
    }
    left |= {name: [x] for name, x in after.buffers.items() if name not in before.buffers}
    for name, xs in left.items():
        if xs and not check.is_ignored(name):
            _report_tensors(name, xs, check)
    for name, value in after.values.items():
        old = before.values.get(name)
        # an attribute that was absent or None is filled in once: a cache, and no counter
        if old is not None and old != value and not check.is_ignored(name):
            _report_value(name, old, value, check)


def _report_tensors(name: str, tensors: list[torch.Tensor], check: LeftoverCheck) -> None:
    if check.has_program:
        return  # the program may read the attribute itself
    holder, _, attribute = name.rpartition(".")
    label = f"{check.kind}'s forward pass left a tensor in its attribute {check.prefix + name!r}"
    if any(map(is_differentiated, tensors)):
        read = f"module.get_submodule({holder!r}).{attribute}" if holder else f"module.{attribute}"
        raise RuntimeError(
            f"fzero.nn: {label}, which depends on the parameters. apply runs a copy of the module, so code that reads "
            "the attribute after the call gets an old value or none: have forward return it, or call apply.method("
            f"lambda module, *args: (module(*args), {read})) in place of apply. {_ignoring(name, check, 'reads it')}"
        )
    warn_once(
        f"fzero.nn: {label}. apply runs a copy of the module, so your module does not get it: have forward return it. "
        "A cache belongs in a buffer that the constructor makes"
    )


def _report_value(name: str, old: Any, new: Any, check: LeftoverCheck) -> None:
    label = (
        f"fzero.nn: {check.kind}'s forward pass changed its attribute {check.prefix + name!r} from "
        f"{reprlib.repr(old)} to {reprlib.repr(new)}"
    )
    if check.is_traced:
        raise RuntimeError(
            f"{label}, and a jitted step would keep the value and the branches of its trace: make it a 0-d integer "
            "buffer, which apply returns and the step carries, and choose by torch.where; or pass it as an argument. "
            f"{_ignoring(name, check, 'depends on it')}"
        )
    warn_once(
        f"{label}. apply runs a copy of the module, so your module does not see it, and a jitted step refuses it: make "
        "it a 0-d integer buffer, which apply returns"
    )


def _ignoring(name: str, check: LeftoverCheck, reader: str) -> str:
    call = f"fzero.nn.functional(module, ignore_writes=[{check.prefix + name!r}])"
    return f"If nothing {reader}: {call}{trouble_link('a-module-that-writes-to-itself')}"
