"""Private torch APIs about what runs now: a trace, a transform, the profiler; and about the order of autograd.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = [
    "deciding",
    "in_transform",
    "is_deciding",
    "is_tracing",
    "profiling",
    "quiet_vmap_fallback",
    "raise_priority",
    "without_function_modes",
]


class _Deciding(threading.local):
    on = False


_DECIDING = _Deciding()


@contextmanager
def deciding() -> Iterator[None]:
    """Run a function as a trace would, whose operations nobody records."""
    _DECIDING.on = True
    try:
        yield
    finally:
        _DECIDING.on = False


def is_deciding() -> bool:
    """Return whether this thread runs a function to see what it decides by a size: see `fzero._torch.decisions`."""
    return _DECIDING.on


def is_tracing() -> bool:
    """Return whether Dynamo or make_fx records the operations that this thread runs now, or it runs as if one did."""
    # not is_compiling(), which is the process's: another thread may be tracing
    return torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None or is_deciding()


def in_transform() -> bool:
    """Return whether code runs under a transform of torch.func (grad, vmap, ...), or is traced."""
    return is_tracing() or functorch.peek_interpreter_stack() is not None


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


def without_function_modes() -> AbstractContextManager[None]:
    """Run operations that no `TorchFunctionMode` of this thread sees."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


_SILENT: set[object] = set()
"""Who runs in `quiet_vmap_fallback` now."""


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
