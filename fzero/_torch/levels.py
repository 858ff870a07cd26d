"""Private torch APIs about what runs now: a trace, the levels of torch.func, the profiler, and autograd.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Written",
    "deciding",
    "derivatives",
    "differentiates_now",
    "in_transform",
    "is_deciding",
    "is_differentiated",
    "is_foreign",
    "is_mapped_now",
    "is_tracing",
    "is_wrapped",
    "maps_now",
    "may_differ",
    "profiling",
    "quiet_vmap_fallback",
    "raise_priority",
    "unwrapped",
    "vmaps",
    "without_function_modes",
    "written",
]

# Private torch APIs about what runs now: a trace, a transform, the profiler; and about the order of autograd.
#
# All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.


# pyright: ignore[reportAttributeAccessIssue]


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


# pyright: ignore[reportAttributeAccessIssue]


# Private torch APIs about the levels of torch.func: which transforms run, and which tensors they track.


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether a transform of torch.func tracks a tensor."""
    return functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) > 0


def is_mapped_now(x: torch.Tensor) -> bool:
    """Return whether a tensor is batched by the innermost transform that runs now, a vmap."""
    return functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_current_level()


def may_differ(x: torch.Tensor, token: torch.Tensor) -> bool:
    """Return False for a tensor that the vmap that maps over a token does not map over: it is one for all samples."""
    if not functorch.is_batchedtensor(token):
        return True
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_get_level(token):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_differentiated(x: torch.Tensor) -> bool:
    """Return whether a tensor requires grad, by itself or in a transform that tracks it."""
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return x.requires_grad


def derivatives(xs: Sequence[torch.Tensor]) -> int | None:
    """Count the gradients that are being taken of tensors, one around the other; None if other transforms run."""
    if any(i.key() != functorch.TransformType.Grad for i in functorch.get_interpreter_stack() or ()):
        return None
    found = 0
    for x in xs:
        count = int(x.requires_grad)
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
            count += x.requires_grad
        found = max(found, count)
    return found


def differentiates_now() -> bool:
    """Return whether a gradient or a forward-mode derivative is being taken by a transform around this code."""
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(i.key() in kinds for i in functorch.get_interpreter_stack() or ())


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies below all transforms of torch.func: ranks stacked, gradients not tracked."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


class Written(NamedTuple):
    """A count that rises whenever a tensor is written in place, and the memory that it stands for.

    The weak reference frees the memory, but not its address: no later storage is taken for this one.
    """

    version: int
    storage: StorageWeakRef


def written(x: torch.Tensor) -> Written:
    """Return what an in-place write into a tensor changes, under any transform.

    Torch counts no writes through `x.data`, and none into what was made in inference mode.
    """
    x = unwrapped(x)  # only what lies below counts
    return Written(0 if x.is_inference() else x._version, StorageWeakRef(x.untyped_storage()))


def is_foreign(x: torch.Tensor) -> bool:
    """Return whether a transform tracks a tensor that does not run now, so that it was captured from outside."""
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    level, stack = functorch.maybe_get_level(x), functorch.get_interpreter_stack() or []
    if level < 1:  # its transform has ended
        return False
    kind = next((i.key() for i in stack if i.level() == level), None)
    return kind is None or (kind == functorch.TransformType.Vmap) != functorch.is_batchedtensor(x)


def maps_now(token: torch.Tensor) -> bool:
    """Return, inside a Function's vmap rule, whether that vmap is the one that maps over a token."""
    return functorch.maybe_get_level(token) == (functorch.maybe_current_level() or 0) + 1


def vmaps() -> list[str]:
    """List the randomness of each vmap that code runs under: Same, Different or Error."""
    kinds = [c for c in functorch.get_interpreter_stack() or () if c.key() == functorch.TransformType.Vmap]
    return [functorch.CVmapInterpreterPtr(c).randomness().name for c in kinds]
