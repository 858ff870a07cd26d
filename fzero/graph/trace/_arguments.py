"""Flatten the arguments of a call of a jitted step, and compute the key that its trace is cached by."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import Buffer, buffers_of
from fzero.sharding import PerRank, Shard, Slot, is_box, spaces

__all__ = ["Arguments", "Key", "LeafPlace", "arguments_of", "blocks_of", "difference", "key_of", "places_of"]

# `(args, kwargs)` is flattened as a tree. The graph takes its distinct tensors: tied weights are one tensor in several
# leaves. The trace contains the structure and every other leaf. Each leaf has a place, by which errors and the plan
# name it. `rebuild` returns the call's arguments with other tensors, such as stand-ins, in place of the distinct ones.


PLAIN = {torch.Tensor, torch.nn.Parameter}  # subclasses may redefine operations


class LeafPlace(NamedTuple):
    """The place of a leaf in a call, or in a result.

    Attributes:
        path: in a call "0.3.w" for leaf "w" of argument 3 by position, "1.lr.w" for leaf "w" of argument lr by keyword;
            in a result the leaf's path.
        unit: the unit whose shard the leaf is, or "".
        space: the memory that the leaf lies in: "device" or "host".
    """

    path: str
    unit: str
    space: str = "device"

    @property
    def position(self) -> int | None:
        """The position of the argument; None for a keyword argument."""
        kind, _, rest = self.path.partition(".")
        return int(rest.partition(".")[0]) if kind == "0" else None

    def __str__(self) -> str:
        kind, _, rest = self.path.partition(".")
        name, _, leaf = rest.partition(".")
        name = name if kind == "0" else repr(name)
        if self.unit:
            return f"argument {name}, unit {self.unit!r}" + (", on the host" if self.space == "host" else "")
        return f"argument {name}, leaf {leaf!r}" if leaf else f"argument {name}"


@dataclass(frozen=True)
class Arguments:
    """The flattened arguments of a call.

    Attributes:
        leaves: the leaves of `(args, kwargs)`.
        structure: the structure of `(args, kwargs)`.
        where: the position of each distinct tensor among the leaves.
        index: for each leaf its number among the distinct tensors; None for a leaf that is no tensor.
    """

    leaves: list[Any]
    structure: Any
    where: list[int]
    index: list[int | None]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The distinct tensors."""
        return [self.leaves[i] for i in self.where]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The distinct tensors that lie side by side in memory, as `step.init` places the leaves of a unit."""
        return buffers_of(self.tensors)

    @cached_property
    def leaf_places(self) -> list[LeafPlace]:
        """The place of each leaf."""
        return places_of(tree.unflatten(self.structure, list(range(len(self.leaves)))))

    @cached_property
    def places(self) -> list[LeafPlace]:
        """The place of each distinct tensor's first leaf."""
        return [self.leaf_places[i] for i in self.where]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of the distinct ones."""
        leaves = [x if i is None else tensors[i] for x, i in zip(self.leaves, self.index, strict=True)]
        return tree.unflatten(self.structure, leaves)

    def check_traceable(self) -> None:
        """Check that no tensor requires grad.

        Raises:
            ValueError: if a tensor does. The message names it.
        """
        for place, x in zip(self.places, self.tensors, strict=True):
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"fzero.jit: {place} requires grad, and a jitted step's results have no autograd graph: "
                    "take gradients inside the step (fzero.value_and_grad) and pass detached tensors"
                )

    def check_plain(self) -> None:
        """Check that every tensor is a plain `torch.Tensor` or `nn.Parameter`.

        Raises:
            TypeError: if a tensor is of another class. The message names it.
        """
        if {type(x) for x in self.tensors} <= PLAIN:
            return
        place, x = next((p, x) for p, x in zip(self.places, self.tensors, strict=True) if type(x) not in PLAIN)
        raise TypeError(
            f"fzero.jit: {place} is a {type(x).__name__}, and a graph holds plain tensors only: unpack it outside the "
            "step, or wrap its tensors in a class that is registered as a pytree node"
        )

    def check_real(self) -> None:
        """Check that every tensor has memory.

        Raises:
            ValueError: if a tensor is on the meta device. The message names it.
        """
        for place, x in zip(self.places, self.tensors, strict=True):
            if x.is_meta:
                raise ValueError(
                    f"{place} is on the meta device and has no memory: the step can be planned (fzero.plan), not run"
                )


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Flatten the arguments of a call.

    Raises:
        DonatedError: if an argument was donated to an earlier call.
    """
    leaves, structure = tree.flatten((args, kwargs))
    where: list[int] = []
    index: list[int | None] = []
    numbers: dict[int, int] = {}
    for position, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            index.append(None)
            continue
        number = numbers.setdefault(id(x), len(where))
        if number == len(where):
            where.append(position)
        index.append(number)
    return Arguments(leaves, structure, where, index)


def places_of(values: Any) -> list[LeafPlace]:
    """List the place of each leaf of a tree."""
    places = []
    for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
        if isinstance(x, PerRank):
            paths = tree.flatten_with_paths(x.value)[0]
            places += [LeafPlace(f"{path}.{inner}".strip("."), "") for inner in paths]
        elif isinstance(x, Shard):
            for space, part in zip(spaces(x), x.parts, strict=True):
                places += [LeafPlace(path, x.spec.unit, space)] * len(tree.flatten(part)[0])
        elif not isinstance(x, Slot):
            places.append(LeafPlace(path, ""))
    return places


def blocks_of(places: Sequence[LeafPlace], parameters: Collection[int | None]) -> list[str]:
    """List the number of the repeated block that each leaf belongs to; "" for leaves of no block.

    The leaves of a box belong to its unit's block. The path of another leaf may end with the path of a parameter; then
    the leaf belongs to that parameter's block. So the moment "1.0.mu.blocks.3.w" belongs to block 3, and "1.0.mu.w" to
    none: 1 and 0 are positions in a chain of optimizers.

    Args:
        places: the places of the leaves.
        parameters: the positions of the arguments that hold parameters; if empty, any argument may hold them.
    """
    keys = [place.path.split(".")[2:] for place in places]
    parameter_keys = {
        tuple(key)
        for place, key in zip(places, keys, strict=True)
        if place.position in parameters or (key and not parameters)
    }
    blocks = []
    for place, key in zip(places, keys, strict=True):
        suffixes = [key[i:] for i in range(len(key), -1, -1)]
        path = next((suffix[:-1] for suffix in suffixes if tuple(suffix) in parameter_keys), [])
        path = place.unit.split(".") if place.unit else path
        blocks.append(next((k for k in reversed(path) if k.isdigit()), ""))
    return blocks


# The key that a trace is cached by, and the difference between two calls that need separate traces.


class Key(NamedTuple):
    """The key of a trace: calls with equal keys share the trace.

    Attributes:
        structure: the structure of the arguments.
        index: for each leaf its number among the distinct tensors; None for other leaves.
        tensors: the shape, dtype, strides, device and requires_grad of each distinct tensor.
        buffers: the distinct tensors that lie side by side in memory.
        values: the type and value of each other leaf.
        settings: torch's settings on which a trace depends: default dtype, grad mode and autocast.
    """

    structure: Any
    index: tuple[int | None, ...]
    tensors: tuple[tuple[Any, ...], ...]
    buffers: tuple[Buffer, ...]
    values: tuple[tuple[type, Any], ...]
    settings: tuple[Any, ...]


def key_of(arguments: Arguments) -> Key:
    """Return the key of a call.

    Raises:
        TypeError: if an argument is neither a tensor nor hashable. The message names it.
    """
    tensors = tuple([(x.shape, x.dtype, x.stride(), x.device, x.requires_grad) for x in arguments.tensors])
    rest = [x for x, number in zip(arguments.leaves, arguments.index, strict=True) if number is None]
    values = tuple([(type(x), x.hex() if isinstance(x, float) else x) for x in rest])  # -0.0 == 0.0, and nan != nan
    key = Key(arguments.structure, tuple(arguments.index), tensors, arguments.buffers, values, _settings())
    try:
        hash(key)
    except TypeError as error:
        for place, x in zip(arguments.leaf_places, arguments.leaves, strict=True):
            if not isinstance(x, torch.Tensor) and type(x).__hash__ is None:
                raise TypeError(
                    f"fzero.jit: {place} is a {type(x).__name__}, neither a tensor nor hashable: make it a tensor, or "
                    "register its class as a pytree node"
                ) from error
        raise
    return key


def _settings() -> tuple[Any, ...]:
    casts = tuple([torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda")])
    return torch.get_default_dtype(), torch.is_grad_enabled(), casts


def difference(old: Key, arguments: Arguments) -> str:
    """Return one line that says how a call differs from an earlier one."""
    new = key_of(arguments)
    if old.structure != new.structure or len(old.index) != len(new.index):
        return "the arguments have another structure"
    if old.settings != new.settings:
        return "torch's default dtype, grad mode or autocast was switched"
    for place, before, after in zip(arguments.leaf_places, _leaves(old), _leaves(new), strict=True):
        if before.text != after.text:
            return f"{place} was {before.text} and is {after.text}"
        if before != after:
            return f"{place} was {before.text}{before.details} and is {after.text}{after.details}"
    places = zip(arguments.leaf_places, old.index, new.index, strict=True)
    if old.index == new.index:
        return "the leaves of a unit lie side by side in memory in one call, and not in the other"
    return next(f"{place} is tied to another tensor than before" for place, before, after in places if before != after)


class _LeafText(NamedTuple):
    """A description of a leaf: its dtype and shape, or its value; and further details that a trace depends on."""

    text: str
    details: str = ""


def _leaves(key: Key) -> list[_LeafText]:
    values, texts, known_numbers = iter(key.values), [], set()
    for number in key.index:
        if number is None:
            kind, value = next(values)
            texts.append(_LeafText(repr(float.fromhex(value) if kind is float else value)))
            continue
        shape, dtype, strides, device, requires_grad = key.tensors[number]
        details = f", strides {list(strides)}, on {device}{', requires grad' if requires_grad else ''}"
        texts.append(
            _LeafText(f"{dtype} {list(shape)}", details + (", tied to another leaf" if number in known_numbers else ""))
        )
        known_numbers.add(number)
    return texts
