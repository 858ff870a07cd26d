"""The arguments of one call of a jitted step, taken apart, and the key that its trace is cached by."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import Buffer, buffers_of
from fzero.sharding import PerRank, Shard, Slot, is_box, spaces

__all__ = ["Arguments", "Key", "LeafPlace", "arguments_of", "blocks_of", "changed", "key_of", "places_of"]

# The arguments of one call of a jitted step, taken apart.
#
# `(args, kwargs)` is flattened as a tree. Its tensors are what the graph takes, each object once, however many leaves
# it is (tied weights); every other leaf, and the structure, is part of the trace. Each leaf knows its place, by which
# errors and the plan name it. With other tensors in place of the distinct ones, `rebuild` makes the call again: so it
# is traced on stand-ins.


PLAIN = {torch.Tensor, torch.nn.Parameter}  # other classes may do other things with the same operations


class LeafPlace(NamedTuple):
    """Where a leaf stands in a call, or in a result.

    Attributes:
        path: in a call "0.3.w" for leaf "w" of argument 3 by position, "1.lr.w" for leaf "w" of argument lr by keyword;
            in a result the leaf's own.
        unit: the unit that the leaf is a shard of, or "".
        space: the memory that it lies in: "device" or "host".
    """

    path: str
    unit: str
    space: str = "device"

    @property
    def position(self) -> int | None:
        """The position of the argument; None for one by keyword."""
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
    """The arguments of a call, taken apart.

    Attributes:
        leaves: the leaves of `(args, kwargs)`.
        structure: of `(args, kwargs)`.
        where: the position of each distinct tensor among the leaves.
        index: for each leaf its number among the distinct tensors; None for what is no tensor.
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
        """Those of the distinct tensors that lie side by side: as `step.init` lays the leaves of a unit."""
        return buffers_of(self.tensors)

    @cached_property
    def leaf_places(self) -> list[LeafPlace]:
        """The place of each leaf."""
        return places_of(tree.unflatten(self.structure, list(range(len(self.leaves)))))

    @cached_property
    def places(self) -> list[LeafPlace]:
        """The place of each distinct tensor: that of its first leaf."""
        return [self.leaf_places[i] for i in self.where]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of the distinct ones."""
        leaves = [x if i is None else tensors[i] for x, i in zip(self.leaves, self.index, strict=True)]
        return tree.unflatten(self.structure, leaves)

    def check_traceable(self) -> None:
        """Check that no tensor requires grad.

        Raises:
            ValueError: if one does. The message names it.
        """
        for place, x in zip(self.places, self.tensors, strict=True):
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"fzero.jit: {place} requires grad, and a jitted step's results have no autograd graph: "
                    "take gradients inside the step (fzero.value_and_grad) and pass tensors detached"
                )

    def check_plain(self) -> None:
        """Check that every tensor is no more than a tensor.

        Raises:
            TypeError: if one is of a class of its own. The message names it.
        """
        if {type(x) for x in self.tensors} <= PLAIN:
            return
        place, x = next((p, x) for p, x in zip(self.places, self.tensors, strict=True) if type(x) not in PLAIN)
        raise TypeError(
            f"fzero.jit: {place} is a {type(x).__name__}, and a graph knows plain tensors only: take it apart outside "
            "the step, or register a class of your own for it as a pytree node"
        )

    def check_real(self) -> None:
        """Check that every tensor has memory.

        Raises:
            ValueError: if one is on the meta device. The message names it.
        """
        for place, x in zip(self.places, self.tensors, strict=True):
            if x.is_meta:
                raise ValueError(
                    f"{place} is on the meta device, without memory: such a step can be planned (fzero.plan), not run"
                )


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Take the arguments of a call apart.

    Raises:
        DonatedError: if one was donated.
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
    found = []
    for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
        if isinstance(x, PerRank):
            paths = tree.flatten_with_paths(x.value)[0]
            found += [LeafPlace(f"{path}.{inner}".strip("."), "") for inner in paths]
        elif isinstance(x, Shard):
            for space, part in zip(spaces(x), x.parts, strict=True):
                found += [LeafPlace(path, x.spec.unit, space)] * len(tree.flatten(part)[0])
        elif not isinstance(x, Slot):
            found.append(LeafPlace(path, ""))
    return found


def blocks_of(places: Sequence[LeafPlace], parameters: Collection[int | None]) -> list[str]:
    """List for each leaf the number of the repeated block that it belongs to, or "".

    A box belongs to its unit's. Another leaf belongs to that of the parameter whose path its own ends with. So the
    moment "1.0.mu.blocks.3.w" is of block 3, and "1.0.mu.w" of none: 1 and 0 are places in a chain of optimizers.

    Args:
        places: of the leaves.
        parameters: the positions of the arguments that hold parameters; if none is known, any argument may.
    """
    keys = [place.path.split(".")[2:] for place in places]
    whole = {
        tuple(mine)
        for place, mine in zip(places, keys, strict=True)
        if place.position in parameters or (mine and not parameters)
    }
    found = []
    for place, mine in zip(places, keys, strict=True):
        ends = [mine[i:] for i in range(len(mine), -1, -1)]
        path = next((end[:-1] for end in ends if tuple(end) in whole), [])
        path = place.unit.split(".") if place.unit else path
        found.append(next((key for key in reversed(path) if key.isdigit()), ""))
    return found


# What a trace is cached by, and what distinguishes two calls that need a trace each.


class Key(NamedTuple):
    """What one trace depends on: calls with equal keys share it.

    Attributes:
        structure: of the arguments.
        index: which leaves are which distinct tensor; None for other leaves.
        tensors: of each distinct tensor its shape, dtype, strides, device and whether it requires grad.
        buffers: which of them lie side by side.
        values: of each other leaf its type and value.
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
        TypeError: if an argument that is no tensor has no hash. The message names it.
    """
    tensors = tuple([(x.shape, x.dtype, x.stride(), x.device, x.requires_grad) for x in arguments.tensors])
    others = [x for x, number in zip(arguments.leaves, arguments.index, strict=True) if number is None]
    values = tuple([(type(x), x.hex() if isinstance(x, float) else x) for x in others])  # -0.0 == 0.0, and nan != nan
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


def changed(old: Key, arguments: Arguments) -> str:
    """Say in one line what distinguishes a call from an earlier one."""
    new = key_of(arguments)
    if old.structure != new.structure or len(old.index) != len(new.index):
        return "the arguments have another structure"
    if old.settings != new.settings:
        return "torch's default dtype, grad mode or autocast was switched"
    for place, before, now in zip(arguments.leaf_places, _leaves(old), _leaves(new), strict=True):
        if before.what != now.what:
            return f"{place} was {before.what} and is {now.what}"
        if before != now:
            return f"{place} was {before.what}{before.more} and is {now.what}{now.more}"
    places = zip(arguments.leaf_places, old.index, new.index, strict=True)
    if old.index == new.index:
        return "the leaves of a unit lay side by side in memory, and do no longer, or the other way round"
    return next(f"{place} is tied to another tensor than before" for place, before, now in places if before != now)


class _LeafInWords(NamedTuple):
    """A leaf in words: what it is, and what else a trace depends on."""

    what: str
    more: str = ""


def _leaves(key: Key) -> list[_LeafInWords]:
    values, found, seen = iter(key.values), [], set()
    for number in key.index:
        if number is None:
            kind, value = next(values)
            found.append(_LeafInWords(repr(float.fromhex(value) if kind is float else value)))
            continue
        shape, dtype, strides, device, requires_grad = key.tensors[number]
        more = f", strides {list(strides)}, on {device}{', requires grad' if requires_grad else ''}"
        found.append(
            _LeafInWords(f"{dtype} {list(shape)}", more + (", tied to another leaf" if number in seen else ""))
        )
        seen.add(number)
    return found
