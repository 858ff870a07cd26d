"""Private torch APIs about what runs now: a transform of torch.func, a trace, a profiler.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = [
    "in_transform",
    "is_deciding",
    "is_fused",
    "is_old_function_error",
    "is_profiling",
    "is_tracing",
    "quiet_vmap_fallback",
    "raise_priority",
    "set_deciding",
    "set_fused",
    "without_function_modes",
]


class _ThreadFlag(threading.local):
    on = False


_DECIDING, _FUSED = _ThreadFlag(), _ThreadFlag()


@contextmanager
def set_deciding() -> Iterator[None]:
    """Run code in this context as in a trace, without recording its operations."""
    _DECIDING.on = True
    try:
        yield
    finally:
        _DECIDING.on = False


@contextmanager
def set_fused(on: bool) -> Iterator[None]:
    """Say whether a compiler fuses the operations that this context traces."""
    was_on, _FUSED.on = _FUSED.on, on
    try:
        yield
    finally:
        _FUSED.on = was_on


def is_fused() -> bool:
    """Return whether a compiler will fuse the running operations.

    Then many plain operations take less time than few look-ups, of which a CPU's compiler makes no vector code. Code
    that asks must give the same numbers either way.
    """
    return _FUSED.on or torch.compiler.is_dynamo_compiling()


def is_old_function_error(error: RuntimeError) -> bool:
    """Return whether a transform of torch.func met an `autograd.Function` of torch's older form, without setup_context.

    Torch raises a plain RuntimeError, so only the text tells it from others.
    """
    return "must override the setup_context staticmethod" in str(error)


def is_deciding() -> bool:
    """Return whether this thread runs a function to record its decisions by a size: see `fzero._torch.decisions`."""
    return _DECIDING.on


def is_tracing() -> bool:
    """Return whether Dynamo, AOTAutograd or make_fx records the operations of this thread, or it runs as in a trace."""
    # is_compiling() will not do: it is true for the process while another thread is tracing
    return torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None or _in_aot() or is_deciding()


def _in_aot() -> bool:
    """Return whether AOTAutograd runs the code on functional tensors, as it does before it records operations."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def in_transform() -> bool:
    """Return whether the running code is under a transform of torch.func (grad, vmap, ...) or in a trace."""
    return is_tracing() or functorch.peek_interpreter_stack() is not None


def is_profiling() -> bool:
    """Return whether torch's profiler is on."""
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def raise_priority(output: torch.Tensor, levels: int = 1) -> None:
    """Make eager autograd run the node that made `output` as soon as its gradients exist.

    Autograd takes the ready node with the highest sequence number. A gather is the first node of the forward
    pass, so without this its reduce_scatter would wait for the whole backward pass, with every full gradient
    alive. Among ready nodes with raised priority, the node with the largest `levels` runs first. While tracing this
    is a no-op, because the graph sets the order.
    """
    if not is_tracing() and output.grad_fn is not None:
        output.grad_fn._set_sequence_nr(2**62 + levels)  # pyright: ignore[reportAttributeAccessIssue]


def without_function_modes() -> AbstractContextManager[None]:
    """Return a context in which no `TorchFunctionMode` of this thread sees operations."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


_SILENT: set[object] = set()
"""The running contexts of `quiet_vmap_fallback`."""


@contextmanager
def quiet_vmap_fallback() -> Iterator[None]:
    """Silence "There is a performance drop because we have not yet implemented the batching rule".

    In a simulation such an operation (flash attention on a CPU) runs rank by rank, as it does on real ranks. The switch
    belongs to the process, so the warning is on again when the last context ends.
    """
    context = object()
    _SILENT.add(context)
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _SILENT.discard(context)
        if not _SILENT:
            functorch._set_vmap_fallback_warning_enabled(True)
