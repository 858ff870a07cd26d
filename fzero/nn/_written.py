"""Find what a forward pass wrote besides its result: tensors that it received, and attributes of its module.

`apply` runs a copy of the module. So a value in an attribute never reaches the user's module, and a replaced parameter
has no gradient. The tensors and attributes are compared before and after a call. A written parameter is an error;
written attributes are named in a notice.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from fzero._notice import notice
from fzero._torch.modules import attributes, version_of

__all__ = [
    "ModuleContents",
    "Versions",
    "check_leftovers",
    "check_writes",
    "contents_of",
    "module_states",
    "restore_modules",
    "tensors_in",
    "versions_of",
]

CONTAINERS = (list, tuple, dict, set, deque)
Tensors = Mapping[str, torch.Tensor]


# ---------------------------------------------------------------- tensors that a call receives


class Versions(NamedTuple):
    """The tensors of a call, and their version counters at its start, both by name."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int | None]


def versions_of(state: Tensors) -> Versions:
    """Record the tensors of a call and their versions."""
    return Versions(dict(state), {name: version_of(x) for name, x in state.items()})


def check_writes(before: Versions, state: Tensors, params: frozenset[str], mutable: frozenset[str]) -> None:
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
        tensors: by attribute, the ids of the tensors that it is or contains.
        numbers: by attribute, its value if that is a number.
        parameters: the names of the parameters.
        buffers: the names of the buffers.
    """

    tensors: dict[str, set[int]]
    numbers: dict[str, int | float]
    parameters: set[str]
    buffers: set[str]


def contents_of(module: torch.nn.Module) -> ModuleContents:
    """Record the contents of a module and its submodules."""
    tensors: dict[str, set[int]] = {}
    numbers: dict[str, int | float] = {}
    for prefix, m in module.named_modules():
        for name, x in _stored_attributes(m).items():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(x, int | float):
                numbers[path] = x
            else:
                tensors[path] = {id(y) for y in tensors_in(x)}
    return ModuleContents(tensors, numbers, set(dict(module.named_parameters())), set(dict(module.named_buffers())))


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


def check_leftovers(before: ModuleContents, module: torch.nn.Module) -> None:
    """Give a notice for each attribute in which a forward pass left a value.

    Raises:
        RuntimeError: if the pass made a parameter, which would not be trained.
    """
    after, kind = contents_of(module), type(module).__name__
    for name in sorted(after.parameters - before.parameters):
        raise RuntimeError(
            f"{kind}'s forward pass made parameter {name!r}, which would not be trained: make it in the constructor, "
            "or run the module once on a batch before fzero.nn.functional(module)"
        )
    changed = [name for name, ids in after.tensors.items() if ids - before.tensors.get(name, set())]
    for name in [*changed, *sorted(after.buffers - before.buffers)]:
        notice(
            f"fzero.nn: {kind}'s forward pass left a tensor in its attribute {name!r}. apply runs a copy of the "
            "module, so your module does not get it: have forward return it. A cache belongs in a buffer that the "
            "constructor makes"
        )
    for name, value in after.numbers.items():
        if before.numbers.get(name, value) != value:
            notice(
                f"fzero.nn: {kind}'s forward pass changed the number in its attribute {name!r}. apply runs a copy of "
                "the module, so your module does not see it, and a jitted step always uses the number at its trace: "
                "make it a 0-d integer buffer, which apply returns"
            )
