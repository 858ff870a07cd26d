"""Private torch APIs about trees, about tensors that share a buffer, and about modules and their hooks.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "Buffer",
    "attributes",
    "buffers_of",
    "children_without_names",
    "forward_hooks",
    "gradient_hooks",
    "has_backward_hook",
    "in_buffers",
    "pytree",
    "register_box",
    "statistics",
    "storage_id",
    "version_of",
    "view_of",
]

# Private torch APIs about trees: how torch and optree are told of a new kind of node.
#
# All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.


def register_box(
    cls: type,
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Register a pytree node with torch (for torch.func) and with optree (for third-party optimizers).

    `flatten(box) -> (children, static)`, `unflatten(static, children) -> box`. Both are plain functions:
    Dynamo cannot trace the methods of a class decorator.
    """
    import optree

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
    optree.register_pytree_node(cls, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)  # pyright: ignore


def children_without_names(x: Any) -> list[Any] | None:
    """Return the children of a node whose kind was registered without names for them; None for all else."""
    kind = pytree.SUPPORTED_NODES.get(pytree._get_node_type(x))
    return list(kind.flatten_fn(x)[0]) if kind is not None and kind.flatten_with_keys_fn is None else None


# Private torch APIs about memory: which tensors lie side by side in one buffer, and such tensors.
#
# All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_buffers.py` says which one broke when torch changes.


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share memory."""
    return x.untyped_storage()._cdata


class Buffer(NamedTuple):
    """Tensors of one dtype that lie side by side and fill their memory.

    Attributes:
        members: the positions of the tensors in a list, in the order in which they lie.
        offsets: where each begins, in elements.
        numel: of all.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def buffers_of(tensors: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Find the buffers that two or more of these tensors, each contiguous, fill without gaps and overlaps."""
    by_storage: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        by_storage.setdefault(storage_id(x), []).append(i)
    if len(by_storage) == len(tensors):
        return ()
    found = [_buffer(tensors, members) for members in by_storage.values() if len(members) > 1]
    return tuple([buffer for buffer in found if buffer is not None])


def _buffer(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> Buffer | None:
    first = tensors[members[0]]
    plain = all(tensors[i].is_contiguous() and tensors[i].dtype == first.dtype for i in members)
    if not plain or any(tensors[i].is_conj() or tensors[i].is_neg() for i in members):
        return None
    # an empty one comes before what begins where it lies
    ordered = sorted(members, key=lambda i: (tensors[i].storage_offset(), tensors[i].numel(), i))
    offsets, end = [], 0
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
    """Make other tensors of the same shapes and strides, which lie side by side where the given ones do.

    Args:
        tensors: the given ones.
        empty: makes one like a tensor, of a shape and strides.
    """
    found: dict[int, torch.Tensor] = {}
    for buffer in buffers_of(tensors):
        whole = empty(tensors[buffer.members[0]], [buffer.numel], [1])
        for i, at in zip(buffer.members, buffer.offsets, strict=True):
            found[i] = view_of(whole, at, tensors[i].shape)
    return [found[i] if i in found else empty(x, x.shape, x.stride()) for i, x in enumerate(tensors)]


def view_of(buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over a part of a buffer `[n]` that starts at `offset`; torch does not take it for a view."""
    numel = torch.Size(shape).numel()
    return buffer.narrow(0, offset, numel).view(shape).data


# Private torch APIs about modules, and about hooks on their tensors.


_MODULES_OWN = frozenset(vars(torch.nn.Module()))


def gradient_hooks(x: torch.Tensor) -> list[str]:
    """List the methods by which hooks on the gradient of a tensor were registered."""
    found = {
        "register_hook": x._backward_hooks,
        "register_post_accumulate_grad_hook": x._post_accumulate_grad_hooks,  # pyright: ignore[reportAttributeAccessIssue]
    }
    return [name for name, hooks in found.items() if hooks]


def has_backward_hook(module: torch.nn.Module) -> bool:
    """Return whether a full backward hook, or a backward pre-hook, is registered on a module itself."""
    return bool(module._backward_pre_hooks) or (bool(module._backward_hooks) and module._is_full_backward_hook is True)


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the hooks before and after a module's forward pass, by handle: the dicts themselves."""
    return [module._forward_pre_hooks, module._forward_hooks]


def statistics(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that its state dict holds."""
    own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return {name: b for name, b in own.items() if name not in module._non_persistent_buffers_set}


def attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return a module's own attributes: no parameters, buffers, submodules, nor those that every module has."""
    return {name: x for name, x in vars(module).items() if name not in _MODULES_OWN}


def version_of(x: torch.Tensor) -> int | None:
    """Return a number that grows when a tensor is written in place; None of inference tensors, which have none."""
    return None if x.is_inference() else x._version
