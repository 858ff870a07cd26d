"""Private torch APIs about trees: register a new kind of node with torch and optree.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from fzero._torch.on_import import register_optree_node

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
