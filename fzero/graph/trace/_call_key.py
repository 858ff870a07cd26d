"""The key that a trace is cached by, and the difference between two calls that need separate traces."""

from typing import Any, NamedTuple

import torch

from fzero._format import format_tensor
from fzero._torch import Buffer, autocast_kinds
from fzero.graph.trace._call_arguments import Arguments

__all__ = ["Key", "call_key", "recompilation_reason"]


class Key(NamedTuple):
    """The key of a trace: calls with equal keys share the trace.

    Attributes:
        structure: the structure of the arguments.
        tensor_indices: for each leaf its index among the distinct tensors; None for other leaves.
        tensors: the shape, dtype, strides, device and requires_grad of each distinct tensor.
        buffers: the distinct tensors that lie side by side in memory.
        values: the type and value of each other leaf.
        settings: torch's settings on which a trace depends: default dtype, grad mode and autocast.
    """

    structure: Any
    tensor_indices: tuple[int | None, ...]
    tensors: tuple[tuple[Any, ...], ...]
    buffers: tuple[Buffer, ...]
    values: tuple[tuple[type, Any], ...]
    settings: tuple[Any, ...]


def call_key(arguments: Arguments) -> Key:
    """Return the key of a call.

    Raises:
        TypeError: if an argument is neither a tensor nor hashable. The message names it.
    """
    tensors = tuple([(x.shape, x.dtype, x.stride(), x.device, x.requires_grad) for x in arguments.tensors])
    rest = [x for x, index in zip(arguments.leaves, arguments.tensor_indices, strict=True) if index is None]
    values = tuple([(type(x), x.hex() if isinstance(x, float) else x) for x in rest])  # -0.0 == 0.0, and nan != nan
    key = Key(
        structure=arguments.structure,
        tensor_indices=tuple(arguments.tensor_indices),
        tensors=tensors,
        buffers=arguments.buffers,
        values=values,
        settings=_global_settings(),
    )
    try:
        hash(key)
    except TypeError as error:
        for name, x in zip(arguments.leaf_names, arguments.leaves, strict=True):
            if not isinstance(x, torch.Tensor) and type(x).__hash__ is None:
                raise TypeError(
                    f"fzero.jit: {name} is a {type(x).__name__}, neither a tensor nor hashable: make it a tensor, or "
                    "register its class as a pytree node"
                ) from error
        raise
    return key


def _global_settings() -> tuple[Any, ...]:
    casts = tuple([torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in autocast_kinds()])
    return torch.get_default_dtype(), torch.is_grad_enabled(), casts


def recompilation_reason(old_key: Key, arguments: Arguments) -> str:
    """Return one line that says how a call differs from an earlier one."""
    new_key = call_key(arguments)
    if old_key.structure != new_key.structure or len(old_key.tensor_indices) != len(new_key.tensor_indices):
        return "the arguments have another structure"
    if old_key.settings != new_key.settings:
        return "torch's default dtype, grad mode or autocast was switched"
    for name, old_leaf, new_leaf in zip(arguments.leaf_names, _leaf_texts(old_key), _leaf_texts(new_key), strict=True):
        if old_leaf.text != new_leaf.text:
            return f"{name} was {old_leaf.text} and is {new_leaf.text}"
        if old_leaf != new_leaf:
            return f"{name} was {old_leaf.text}{old_leaf.details} and is {new_leaf.text}{new_leaf.details}"
    names = zip(arguments.leaf_names, old_key.tensor_indices, new_key.tensor_indices, strict=True)
    if old_key.tensor_indices == new_key.tensor_indices:
        return "the leaves of a unit lie side by side in memory in one call, and not in the other"
    return next(f"{name} is tied to another tensor than before" for name, before, after in names if before != after)


class _LeafText(NamedTuple):
    """A description of a leaf: its dtype and shape, or its value; and further details that a trace depends on."""

    text: str
    details: str = ""


def _leaf_texts(key: Key) -> list[_LeafText]:
    """Return the text of each leaf of a key, for the error that tells how two calls differ."""
    values = iter(key.values)
    texts: list[_LeafText] = []
    known_indices: set[int] = set()
    for index in key.tensor_indices:
        if index is None:
            kind, value = next(values)
            texts.append(_LeafText(repr(float.fromhex(value) if kind is float else value)))
            continue
        shape, dtype, strides, device, requires_grad = key.tensors[index]
        details = f", strides {list(strides)}, on {device}{', requires grad' if requires_grad else ''}"
        texts.append(
            _LeafText(
                format_tensor(dtype, shape), details + (", tied to another leaf" if index in known_indices else "")
            )
        )
        known_indices.add(index)
    return texts
