"""Every use of a private torch API, with the versions it was seen on.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo import allow_in_graph, assume_constant_result  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import distributed_c10d
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fzero._torch.tracing import (
    TRACING,
    DataDependentError,
    OpOverload,
    fake_like,
    functional,
    holders,
    inductor,
    is_fake,
    line_of,
    recorded,
    storage_id,
    trace,
    user_line,
)

__all__ = [
    "TRACING",
    "DataDependentError",
    "OpOverload",
    "TorchDispatchMode",
    "allow_in_graph",
    "assume_constant_result",
    "c10d",
    "default_store",
    "fake_like",
    "functional",
    "group_of",
    "holders",
    "in_transform",
    "inductor",
    "is_fake",
    "is_tracing",
    "line_of",
    "profiling",
    "pytree",
    "quiet_vmap_fallback",
    "raise_priority",
    "recorded",
    "register_box",
    "storage_id",
    "trace",
    "user_line",
]

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""


def is_tracing() -> bool:
    """Return whether Dynamo or make_fx records the operations that this thread runs now."""
    # not is_compiling(), which is the process's: another thread may be tracing
    return torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None


def in_transform() -> bool:
    """Return whether code runs under a transform of torch.func (grad, vmap, ...), or is traced."""
    return is_tracing() or functorch.peek_interpreter_stack() is not None


group_of: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
"""Returns the process group of a name, as collectives are given it."""


def default_store() -> torch.distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store that the processes of the world have in common."""
    return distributed_c10d._get_default_store()


def profiling() -> bool:
    """Return whether torch's profiler is on."""
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


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

    In a simulation such an operation (a flash attention on a CPU) runs rank by rank, which is what ranks do. The
    switch is the process's, so it is on again when the last who asked for silence has ended.
    """
    me = object()
    _SILENT.add(me)
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _SILENT.discard(me)
        if not _SILENT:
            functorch._set_vmap_fallback_warning_enabled(True)


_SILENT: set[object] = set()
"""Who runs in `quiet_vmap_fallback` now."""


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
