"""The writes of a forward pass into the module that it runs on: which are errors, and which are lost.

A value in an attribute of the copy that `apply` runs never reaches the user's module, and a replaced parameter has no
gradient. So the tensors and attributes are compared before and after a call. A written parameter is an error; written
attributes are refused or named in a notice.
"""

import reprlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fzero._notice import trouble_link, warn_once
from fzero._torch.levels import is_differentiated
from fzero._torch.memory import tensor_version
from fzero._torch.modules import attributes

__all__ = [
    "LeftoverCheck",
    "check_leftovers",
    "check_writes",
    "module_states",
    "record_contents",
    "record_versions",
    "restore_modules",
    "tensors_in",
]


_CONTAINERS = (list, tuple, dict, set, deque)


_PLAIN = (int, float, complex, str, bytes)  # bool is an int


class _Versions(NamedTuple):
    """The tensors of a call, and their version counters at its start, both by name."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int | None]


def record_versions(state: Mapping[str, torch.Tensor]) -> _Versions:
    """Record the tensors of a call and their versions."""
    return _Versions(dict(state), {name: tensor_version(x) for name, x in state.items()})


def check_writes(
    versions_before: _Versions, state: Mapping[str, torch.Tensor], params: frozenset[str], mutable: frozenset[str]
) -> None:
    """Check that a forward pass replaced no parameter, and wrote in place only into mutable buffers.

    Args:
        versions_before: the tensors and versions before the call.
        state: the tensors after the call, by the same names.
        params: the names of the parameters, which may not be replaced.
        mutable: the names of the buffers that may be written in place.

    Raises:
        RuntimeError: if the pass wrote another tensor in place, or replaced a parameter. The message names the tensor.
    """
    for name, x in versions_before.tensors.items():
        kind = "parameter" if name in params else "buffer"
        if name in params and state[name] is not x:
            raise RuntimeError(
                f"the module's forward pass replaced parameter {name!r}, whose gradient would be lost: use a local "
                "variable in forward, or torch.nn.utils.parametrize"
            )
        if name not in mutable and tensor_version(x) != versions_before.numbers[name]:
            expected = (
                "change it in the train step, or let forward compute a new tensor"
                if name in params
                else "only persistent floating-point buffers and counters of a module in training mode may be written; "
                "others are constants"
            )
            raise RuntimeError(f"the module's forward pass wrote {kind} {name!r} in place: {expected}")


class _ModuleState(NamedTuple):
    """The attributes, parameters and buffers of a submodule before a call."""

    module: torch.nn.Module
    attributes: dict[str, object]
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def module_states(module: torch.nn.Module) -> list[_ModuleState]:
    """Record the current state of a module and its submodules."""
    return [_ModuleState(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]


def restore_modules(states_before: list[_ModuleState], traced: bool) -> None:
    """Restore a module's parameters and buffers after a call. After a trace, restore all attributes too.

    `functional_call` does not restore a submodule that is registered twice. A trace leaves tensors without values in
    attributes.
    """
    for state in states_before:
        m = state.module
        if traced:
            m.__dict__.clear()
            m.__dict__.update(state.attributes)
        m._parameters.clear()
        m._parameters.update(state.parameters)
        m._buffers.update(state.buffers)


class _ModuleContents(NamedTuple):
    """The contents of a module and its submodules that a call may add to or change.

    Attributes:
        tensors: by attribute, the tensors that it is or contains, by id.
        values: by attribute, its plain values, as `_copy_plain_values` copies them.
        parameters: the names of the parameters.
        buffers: the buffers by name.
    """

    tensors: dict[str, dict[int, torch.Tensor]]
    values: dict[str, Any]
    parameters: set[str]
    buffers: dict[str, torch.Tensor]


def record_contents(module: torch.nn.Module) -> _ModuleContents:
    """Record the contents of a module and its submodules."""
    tensors: dict[str, dict[int, torch.Tensor]] = {}
    values: dict[str, Any] = {}
    for prefix, m in module.named_modules():
        for name, x in _stored_attributes(m).items():
            path = f"{prefix}.{name}" if prefix else name
            tensors[path] = {id(y): y for y in tensors_in(x)}
            values[path] = _copy_plain_values(x, set())
    return _ModuleContents(tensors, values, set(dict(module.named_parameters())), dict(module.named_buffers()))


def _stored_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return a module's attributes, except those that torch computes from its parameters at each call."""
    property_names = {
        name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")
    }
    if isinstance(module, torch.nn.RNNBase):
        property_names.add("_flat_weights")
    return {name: x for name, x in attributes(module).items() if name not in property_names}


def tensors_in(x: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, which may be a container."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, _CONTAINERS):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)


_NOT_PLAIN = object()


def _copy_plain_values(x: object, visited: set[int]) -> Any:
    """Copy the numbers, strings and flags of a value, which may be a container; anything else is left out."""
    if x is None or isinstance(x, _PLAIN):
        return x
    if id(x) in visited:
        return _NOT_PLAIN
    visited.add(id(x))
    if isinstance(x, SimpleNamespace) or (is_dataclass(x) and not isinstance(x, type)):
        x = vars(x)
    if isinstance(x, dict):
        copies = {key: _copy_plain_values(y, visited) for key, y in x.items()}
        return {key: y for key, y in copies.items() if y is not _NOT_PLAIN}
    if isinstance(x, set):
        return {y for y in x if isinstance(y, _PLAIN)}
    if isinstance(x, _CONTAINERS):
        return [y for y in [_copy_plain_values(y, visited) for y in x] if y is not _NOT_PLAIN]
    return _NOT_PLAIN


class LeftoverCheck(NamedTuple):
    """A call whose leftovers are checked: the values that it left in attributes of the module.

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


def check_leftovers(contents_before: _ModuleContents, module: torch.nn.Module, check: LeftoverCheck) -> None:
    """Refuse a value that a forward pass left in an attribute if a later reader would miss it; else give a notice.

    Raises:
        RuntimeError: if the pass made a parameter, which would not be trained. Also if it left a tensor that depends on
            parameters, or, in a trace, changed a plain value. The message names the attribute.
    """
    after = record_contents(module)
    for name in sorted(after.parameters - contents_before.parameters):
        raise RuntimeError(
            f"{check.kind}'s forward pass made parameter {name!r}, which would not be trained: make it in the "
            "constructor, or run the module once on a batch before fzero.nn.functional(module)"
        )
    leftovers = {
        name: [x for key, x in xs.items() if key not in contents_before.tensors.get(name, {})]
        for name, xs in after.tensors.items()
    }
    leftovers |= {name: [x] for name, x in after.buffers.items() if name not in contents_before.buffers}
    for name, xs in leftovers.items():
        if xs and not check.is_ignored(name):
            _report_tensors(name, xs, check)
    for name, value in after.values.items():
        old_value = contents_before.values.get(name)
        # an attribute that was absent or None is filled in once: a cache, and no counter
        if old_value is not None and old_value != value and not check.is_ignored(name):
            _report_value(name, old_value, value, check)


def _report_tensors(name: str, tensors: list[torch.Tensor], check: LeftoverCheck) -> None:
    """Raise an error if tensors that a forward pass left in an attribute depend on parameters; else warn once."""
    if check.has_program:
        return  # the program may read the attribute itself
    holder, _, attribute = name.rpartition(".")
    label = f"{check.kind}'s forward pass left a tensor in its attribute {check.prefix + name!r}"
    if any(map(is_differentiated, tensors)):
        expression = f"module.get_submodule({holder!r}).{attribute}" if holder else f"module.{attribute}"
        raise RuntimeError(
            f"fzero.nn: {label}, which depends on the parameters. apply runs a copy of the module, so code that reads "
            "the attribute after the call gets an old value or none: have forward return it, or call apply.method("
            f"lambda module, *args: (module(*args), {expression})) in place of apply. "
            f"{_ignore_hint(name, check, 'reads it')}"
        )
    warn_once(
        f"fzero.nn: {label}. apply runs a copy of the module, so your module does not get it: have forward return it. "
        "A cache belongs in a buffer that the constructor makes"
    )


def _report_value(name: str, old_value: Any, new_value: Any, check: LeftoverCheck) -> None:
    """Warn once of an attribute that a forward pass changed; raise an error if a trace would keep its value."""
    label = (
        f"fzero.nn: {check.kind}'s forward pass changed its attribute {check.prefix + name!r} from "
        f"{reprlib.repr(old_value)} to {reprlib.repr(new_value)}"
    )
    if check.is_traced:
        raise RuntimeError(
            f"{label}, and a jitted step would keep the value and the branches of its trace: make it a 0-d integer "
            "buffer, which apply returns and the step carries, and choose by torch.where; or pass it as an argument. "
            f"{_ignore_hint(name, check, 'depends on it')}"
        )
    warn_once(
        f"{label}. apply runs a copy of the module, so your module does not see it, and a jitted step refuses it: make "
        "it a 0-d integer buffer, which apply returns"
    )


def _ignore_hint(name: str, check: LeftoverCheck, reader: str) -> str:
    call = f"fzero.nn.functional(module, ignore_writes=[{check.prefix + name!r}])"
    return f"If nothing {reader}: {call}{trouble_link('a-module-that-writes-to-itself')}"
