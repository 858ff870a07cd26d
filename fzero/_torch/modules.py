"""Private torch APIs about trees, about tensors that share a buffer, and about modules and their hooks.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from fzero._torch.on_import import register_optree_node

__all__ = [
    "Buffer",
    "attributes",
    "buffers_of",
    "children_without_names",
    "forward_hooks",
    "gradient_hooks",
    "has_backward_hook",
    "in_buffers",
    "persistent_buffers",
    "pytree",
    "register_box",
    "storage_id",
    "version_of",
    "view_of",
]

# Private torch APIs about trees: register a new kind of node with torch and optree.


def register_box(
    cls: type,
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Register a pytree node with torch (for torch.func) and with optree (for third-party optimizers).

    `flatten(box) -> (children, static)`, `unflatten(static, children) -> box`. Both are plain functions:
    Dynamo cannot trace the methods of a class decorator.
    """
    pytree.register_pytree_node(
        cls,
        lambda box: (list(flatten(box)[0]), flatten(box)[1]),
        lambda children, static: unflatten(static, children),
        flatten_with_keys_fn=lambda box: (  # pyright: ignore[reportArgumentType]
            [(pytree.SequenceKey(i), c) for i, c in enumerate(flatten(box)[0])],
            flatten(box)[1],
        ),
        serialized_type_name=f"fzero.{cls.__name__}",
    )
    register_optree_node(cls, flatten, unflatten)


def children_without_names(x: Any) -> list[Any] | None:
    """Return the children of a node whose kind was registered without names for its children; None for other values."""
    kind = pytree.SUPPORTED_NODES.get(pytree._get_node_type(x))
    return list(kind.flatten_fn(x)[0]) if kind is not None and kind.flatten_with_keys_fn is None else None


# Private torch APIs about memory: find tensors that lie side by side in one buffer, and make such tensors.
#
# They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_buffers.py` shows which.


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share memory."""
    return x.untyped_storage()._cdata


class Buffer(NamedTuple):
    """Tensors of one dtype that lie side by side and fill their memory.

    Attributes:
        members: the positions of the tensors in a list, in the order of memory.
        offsets: the offset of each tensor, in elements.
        numel: the number of elements of all tensors together.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def buffers_of(tensors: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Return the buffers that two or more of these tensors, all contiguous, fill without gaps and overlaps."""
    by_storage: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        by_storage.setdefault(storage_id(x), []).append(i)
    if len(by_storage) == len(tensors):
        return ()
    buffers = [_buffer(tensors, members) for members in by_storage.values() if len(members) > 1]
    return tuple([buffer for buffer in buffers if buffer is not None])


def _buffer(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> Buffer | None:
    """Return the order of the members if they fill one memory without gaps, so that one tensor can stand for all."""
    first = tensors[members[0]]
    is_plain = all(tensors[i].is_contiguous() and tensors[i].dtype == first.dtype for i in members)
    if not is_plain or any(tensors[i].is_conj() or tensors[i].is_neg() for i in members):
        return None
    # an empty tensor comes before a tensor that begins at the same offset
    ordered = sorted(members, key=lambda i: (tensors[i].storage_offset(), tensors[i].numel(), i))
    offsets = []
    end = 0
    for i in ordered:
        if tensors[i].storage_offset() != end:
            return None
        offsets.append(end)
        end += tensors[i].numel()
    fills = end * first.element_size() == first.untyped_storage().nbytes()
    return Buffer(tuple(ordered), tuple(offsets), end) if fills else None


def in_buffers(
    tensors: Sequence[torch.Tensor], empty: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
) -> list[torch.Tensor]:
    """Return new tensors of the same shapes and strides, which share buffers as `tensors` do.

    Args:
        tensors: the tensors to imitate.
        empty: a function `(tensor, shape, strides)` that returns a new tensor like `tensor`, of this shape and strides.
    """
    members: dict[int, torch.Tensor] = {}
    for buffer in buffers_of(tensors):
        data = empty(tensors[buffer.members[0]], [buffer.numel], [1])
        for i, offset in zip(buffer.members, buffer.offsets, strict=True):
            members[i] = view_of(data, offset, tensors[i].shape)
    return [members[i] if i in members else empty(x, x.shape, x.stride()) for i, x in enumerate(tensors)]


def view_of(buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over the part of a buffer `[n]` from `offset` on. For torch it is not a view."""
    numel = torch.Size(shape).numel()
    return buffer.narrow(0, offset, numel).view(shape).data


# Private torch APIs about modules, and about hooks on their tensors.


_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def gradient_hooks(x: torch.Tensor) -> list[str]:
    """List the methods by which hooks on a tensor's gradient were registered."""
    hooks_by_method = {
        "register_hook": x._backward_hooks,
        "register_post_accumulate_grad_hook": x._post_accumulate_grad_hooks,  # pyright: ignore[reportAttributeAccessIssue]
    }
    return [name for name, hooks in hooks_by_method.items() if hooks]


def has_backward_hook(module: torch.nn.Module) -> bool:
    """Return whether a full backward hook, or a backward pre-hook, is registered on a module itself."""
    return bool(module._backward_pre_hooks) or (bool(module._backward_hooks) and module._is_full_backward_hook is True)


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return a module's dicts of hooks, by handle: the hooks before and the hooks after its forward pass."""
    return [module._forward_pre_hooks, module._forward_hooks]


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a module itself, without its submodules."""
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return {name: b for name, b in buffers.items() if name not in module._non_persistent_buffers_set}


def attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the attributes that a module sets, without parameters, buffers, submodules and those of every module."""
    return {name: x for name, x in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def refresh_flat_weights(module: torch.nn.Module) -> None:
    """Let recurrent modules see parameters that were None for a while."""
    for m in module.modules():
        if isinstance(m, torch.nn.RNNBase):
            m._init_flat_weights()


def version_of(x: torch.Tensor) -> int | None:
    """Return a number that grows with each in-place write into a tensor; None for inference tensors."""
    return None if x.is_inference() else x._version
