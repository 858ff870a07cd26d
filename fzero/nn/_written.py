"""A forward pass may write besides its result: into tensors that it was given, and into its module's attributes.

`apply` runs a copy of the module. So a value in an attribute never reaches the module that the user holds, and a
parameter that is replaced has no gradient. The tensors and the attributes are compared before and after a call: a
written parameter is an error, and a notice names the attributes.
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
    "before_call",
    "check_left",
    "check_written",
    "held",
    "put_back",
    "tensors_in",
    "versions_of",
]

CONTAINERS = (list, tuple, dict, set, deque)
Tensors = Mapping[str, torch.Tensor]


# ---------------------------------------------------------------- tensors that were given


class Versions(NamedTuple):
    """The tensors of a call by name, and their versions at its start."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int | None]


def versions_of(state: Tensors) -> Versions:
    """Take down which tensors a call is given."""
    return Versions(dict(state), {name: version_of(x) for name, x in state.items()})


def check_written(before: Versions, state: Tensors, params: frozenset[str], mutable: frozenset[str]) -> None:
    """Check that a forward pass replaced no parameter, and wrote in place only into the buffers that it may.

    Args:
        before: its tensors, before.
        state: the tensors in their places after it.
        params: the names of the parameters, which it may not replace.
        mutable: the names of the buffers that it may write in place.

    Raises:
        RuntimeError: if it wrote another tensor in place, or replaced a parameter. The message names it.
    """
    for name, x in before.tensors.items():
        what = "parameter" if name in params else "buffer"
        if name in params and state[name] is not x:
            raise RuntimeError(
                f"the module's forward pass replaced parameter {name!r}, whose gradient would be lost: compute with a "
                "local variable, or use torch.nn.utils.parametrize"
            )
        if name not in mutable and version_of(x) != before.numbers[name]:
            expected = (
                "change it in the train step, or let forward compute with a new tensor"
                if name in params
                else "it was taken for a constant, since it is not a persistent floating-point buffer, or a counter, "
                "of a module in training mode"
            )
            raise RuntimeError(f"the module's forward pass wrote {what} {name!r} in place: {expected}")


# ---------------------------------------------------------------- what a call leaves behind


class Before(NamedTuple):
    """A submodule as it was before a call: its attributes, and what stands in the places of parameters and buffers."""

    module: torch.nn.Module
    attributes: dict[str, object]
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]


def before_call(module: torch.nn.Module) -> list[Before]:
    """Take down a module and its submodules as they are."""
    return [Before(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in module.modules()]


def put_back(before: list[Before], traced: bool) -> None:
    """Put a module's stand-ins back, and after a trace all attributes too, whose tensors have no values.

    `functional_call` forgets the stand-ins of a submodule that is registered twice.
    """
    for was in before:
        m = was.module
        if traced:
            m.__dict__.clear()
            m.__dict__.update(was.attributes)
        m._parameters.clear()
        m._parameters.update(was.parameters)
        m._buffers.update(was.buffers)


# ---------------------------------------------------------------- attributes


class ModuleContents(NamedTuple):
    """The contents of a module and its submodules, to which a call may add, or which it may change.

    Attributes:
        tensors: attribute -> the ids of the tensors that it is, or holds in a container.
        numbers: attribute -> its value, if that is a number.
        parameters: the names of the parameters.
        buffers: the names of the buffers.
    """

    tensors: dict[str, set[int]]
    numbers: dict[str, int | float]
    parameters: set[str]
    buffers: set[str]


def held(module: torch.nn.Module) -> ModuleContents:
    """Take down the contents of a module and its submodules."""
    tensors: dict[str, set[int]] = {}
    numbers: dict[str, int | float] = {}
    for prefix, m in module.named_modules():
        for name, x in _remembered(m).items():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(x, int | float):
                numbers[path] = x
            else:
                tensors[path] = {id(y) for y in tensors_in(x)}
    return ModuleContents(tensors, numbers, set(dict(module.named_parameters())), set(dict(module.named_buffers())))


def _remembered(module: torch.nn.Module) -> dict[str, object]:
    """Return a module's attributes without those that torch makes of its parameters at each call."""
    made = {name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")}
    if isinstance(module, torch.nn.RNNBase):
        made.add("_flat_weights")
    return {name: x for name, x in attributes(module).items() if name not in made}


def tensors_in(x: object) -> Iterator[torch.Tensor]:
    """Find the tensors in a value, and in containers in it."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, CONTAINERS):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)


def check_left(before: ModuleContents, module: torch.nn.Module) -> None:
    """Name the attributes in which a forward pass left a value, in a notice for each.

    Raises:
        RuntimeError: if it made a parameter, which would not be trained.
    """
    after, kind = held(module), type(module).__name__
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
                "the module, so your module does not see it, and a jitted step has the number of its trace: make it a "
                "0-d integer buffer, which apply returns"
            )
