"""Every use of a private torch API, with the versions it was seen on.

All of these were seen on torch 2.11 and 2.13. `tests/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo import allow_in_graph, assume_constant_result  # pyright: ignore[reportPrivateImportUsage]
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

__all__ = [
    "allow_in_graph",
    "assume_constant_result",
    "c10d",
    "is_tracing",
    "pytree",
    "quiet_vmap_fallback",
    "raise_priority",
    "register_box",
]

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""


def is_tracing() -> bool:
    """Tell whether Dynamo or make_fx records the operations that run now."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def raise_priority(output: torch.Tensor, by: int = 1) -> None:
    """Make eager autograd run the node that made `output` as soon as its gradients exist.

    Autograd takes the ready node with the highest sequence number. A gather is the first node of the forward
    pass, so without this its reduce_scatter would wait for the whole backward pass, with every full gradient
    alive. Of ready nodes with raised priority the one raised `by` more runs first. A no-op while tracing, where
    the order is the graph's.
    """
    if not is_tracing() and output.grad_fn is not None:
        output.grad_fn._set_sequence_nr(2**62 + by)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def quiet_vmap_fallback() -> Iterator[None]:
    """Silence "There is a performance drop because we have not yet implemented the batching rule".

    In a simulation such an operation (a flash attention on a CPU) runs rank by rank, which is what ranks do.
    """
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


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
