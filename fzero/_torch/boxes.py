"""Private torch APIs about trees: how torch and optree are told of a new kind of node.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

__all__ = ["children_without_names", "pytree", "register_box"]


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
