"""Private torch APIs about the settings of a thread, for ranks that are threads.

A rank in lockstep starts with its caller's settings. Its changes apply to this rank alone, and end with it.
They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/axes/test_lockstep_state.py` shows which.
"""

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

__all__ = ["load_forward_mode", "thread_state", "torch_c"]


def thread_state() -> Callable[[], Any]:
    """Read torch's state of this thread, and return a context manager that applies it in another thread.

    The state is: grad mode, inference mode, autocast, function modes and dispatch modes (such as `torch.device("meta")`
    and `FlopCounterMode`), the hooks of saved tensors, and the number of threads. When the context ends, the other
    thread has its previous state again. `_SETTINGS` lists the state of the process.
    """
    grad, forward, inference = torch.is_grad_enabled(), _forward(), torch.is_inference_mode_enabled()
    casts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    cache, threads = torch.is_autocast_cache_enabled(), torch.get_num_threads()
    functions, operations = _function_modes(), _operation_modes()
    hooks, refusal = _saved_tensor_hooks(), _refusal_of_hooks()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    @contextmanager
    def inherit() -> Iterator[None]:
        """Enter torch's modes and settings of the thread that made this context."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(forward_ad._set_fwd_grad_enabled(forward))
            for device, is_enabled, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype, is_enabled, cache))
            stack.enter_context(_with_default_device(default))
            stack.enter_context(_with_function_modes(functions))
            stack.enter_context(_with_operation_modes(operations))
            stack.enter_context(_with_saved_tensor_hooks(hooks, refusal))
            yield

    return inherit


@functools.cache
def load_forward_mode() -> None:
    """Load what torch loads at the first forward-mode derivative of a process.

    From torch 2.15 on that warns of `torch.jit.script`, which torch itself uses there: a FutureWarning, so users would
    see it. It runs once, because each new filter of warnings makes Python repeat warnings. This function can go when
    torch no longer uses `torch.jit.script`.
    """
    if not __debug__ or os.environ.get("PYTORCH_JIT", "1") != "1":  # as torch asks itself
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", FutureWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


torch_c: Any = torch._C
_DEVICES = ("cpu", "cuda")  # the devices of autocast

_forward: Callable[[], bool] = torch_c._is_fwd_grad_enabled
_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_operation_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
_refusal_of_hooks: Callable[[], str | None] = torch_c._autograd._saved_tensors_hooks_get_disabled_error_message


def _saved_tensor_hooks() -> Any:
    """Return the innermost pair of hooks that pack and unpack saved tensors, or None."""
    return torch_c._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Replace the thread's function modes by these in this context."""
    popped_modes = [overrides._pop_mode() for _ in _function_modes()]
    for mode in modes:
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in _function_modes():
            overrides._pop_mode()
        for mode in reversed(popped_modes):
            overrides._push_mode(mode)


@contextmanager
def _with_operation_modes(modes: Sequence[Any]) -> Iterator[None]:
    mode_count = len(_operation_modes())
    for mode in modes:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in _operation_modes()[mode_count:]:
            _python_dispatch._pop_mode()


@contextmanager
def _with_saved_tensor_hooks(hooks: Any, refusal: str | None) -> Iterator[None]:
    """Set a pair of hooks, or disable hooks with the message `refusal`, in this context; none are left after it."""
    if hooks is not None:
        torch_c._autograd._push_saved_tensors_default_hooks(*hooks)
    if refusal is not None:
        torch_c._autograd._saved_tensors_hooks_disable(refusal)
    try:
        yield
    finally:
        torch_c._autograd._saved_tensors_hooks_enable()
        while _saved_tensor_hooks() is not None:
            torch_c._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def _with_default_device(context: Any) -> Iterator[None]:
    """Set the thread's record of `torch.set_default_device`. Its mode is one of the function modes."""
    previous_context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context
    try:
        yield
    finally:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = previous_context
