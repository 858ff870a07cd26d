"""What a trace is cached by, and what distinguishes two calls that need a trace each."""

from typing import Any, NamedTuple

import torch

from fzero._torch import Buffer
from fzero.graph.trace._arguments import Arguments

__all__ = ["Key", "changed", "key_of"]


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
