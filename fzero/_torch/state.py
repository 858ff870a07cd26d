"""Private torch APIs about the settings of a thread and of the process.

A rank in lockstep starts with its caller's settings. Its changes apply to this rank alone, and end with it.
They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/axes/test_lockstep_state.py` shows which.
"""

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.utils import _device, _python_dispatch

__all__ = [
    "RankSettings",
    "load_forward_mode",
    "read_settings",
    "thread_state",
    "write_settings",
]

# The settings of a thread, for ranks that are threads.


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
            for device, enabled, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
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


_c: Any = torch._C
_DEVICES = ("cpu", "cuda")  # the devices of autocast

_forward: Callable[[], bool] = _c._is_fwd_grad_enabled
_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_operation_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
_refusal_of_hooks: Callable[[], str | None] = _c._autograd._saved_tensors_hooks_get_disabled_error_message


def _saved_tensor_hooks() -> Any:
    """Return the innermost pair of hooks that pack and unpack saved tensors, or None."""
    return _c._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Replace the thread's function modes by these in this context."""
    before = [overrides._pop_mode() for _ in _function_modes()]
    for mode in modes:
        overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in _function_modes():
            overrides._pop_mode()
        for mode in reversed(before):
            overrides._push_mode(mode)


@contextmanager
def _with_operation_modes(modes: Sequence[Any]) -> Iterator[None]:
    before = len(_operation_modes())
    for mode in modes:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in _operation_modes()[before:]:
            _python_dispatch._pop_mode()


@contextmanager
def _with_saved_tensor_hooks(hooks: Any, refusal: str | None) -> Iterator[None]:
    """Set a pair of hooks, or disable hooks with the message `refusal`, in this context; none are left after it."""
    if hooks is not None:
        _c._autograd._push_saved_tensors_default_hooks(*hooks)
    if refusal is not None:
        _c._autograd._saved_tensors_hooks_disable(refusal)
    try:
        yield
    finally:
        _c._autograd._saved_tensors_hooks_enable()
        while _saved_tensor_hooks() is not None:
            _c._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def _with_default_device(context: Any) -> Iterator[None]:
    """Set the thread's record of `torch.set_default_device`. Its mode is one of the function modes."""
    before = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context
    try:
        yield
    finally:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = before


# The settings of the process.


class _Setting(NamedTuple):
    """A setting that all threads share: a function that reads it and a function that writes it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str | None:
    """Return the precision of float32 products; None if it was set per backend, since torch then refuses to read it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _write_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _check_sparse(enabled: bool) -> None:
    checks = torch.sparse.check_sparse_tensor_invariants
    return checks.enable() if enabled else checks.disable()


def _write_default_device(device: torch.device | None) -> None:
    _device.CURRENT_DEVICE = device


_SETTINGS = {
    "anomaly mode": _Setting(_anomaly_mode, lambda x: torch.set_anomaly_enabled(*x)),
    "deterministic algorithms": _Setting(
        _deterministic, lambda x: torch.use_deterministic_algorithms(x[0], warn_only=x[1])
    ),
    "deterministic filling of empty tensors": _Setting(
        _c._get_deterministic_fill_uninitialized_memory, _c._set_deterministic_fill_uninitialized_memory
    ),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": _Setting(lambda: _device.CURRENT_DEVICE, _write_default_device),
    "precision of float32 products": _Setting(_matmul_precision, _write_matmul_precision),
    "flash attention": _Setting(_c._get_flash_sdp_enabled, _c._set_sdp_use_flash),
    "memory-efficient attention": _Setting(_c._get_mem_efficient_sdp_enabled, _c._set_sdp_use_mem_efficient),
    "math attention": _Setting(_c._get_math_sdp_enabled, _c._set_sdp_use_math),
    "cudnn attention": _Setting(_c._get_cudnn_sdp_enabled, _c._set_sdp_use_cudnn),
    "overrideable attention": _Setting(_c._get_overrideable_sdp_enabled, _c._set_sdp_use_overrideable),
    "priority of attention kernels": _Setting(_c._get_sdp_priority_order, _c._set_sdp_priority_order),
    "cudnn": _Setting(_c._get_cudnn_enabled, _c._set_cudnn_enabled),
    "cudnn benchmark": _Setting(_c._get_cudnn_benchmark, _c._set_cudnn_benchmark),
    "cudnn deterministic": _Setting(_c._get_cudnn_deterministic, _c._set_cudnn_deterministic),
    "mkldnn": _Setting(_c._get_mkldnn_enabled, _c._set_mkldnn_enabled),
    "checks of sparse tensors": _Setting(torch.sparse.check_sparse_tensor_invariants.is_enabled, _check_sparse),
    "warn always": _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
}
"""Torch's settings of the whole process, except the random state: ranks draw random numbers one after the other."""


def read_settings() -> dict[str, Any]:
    """Read all settings of the process."""
    return {name: setting.read() for name, setting in _SETTINGS.items()}


def write_settings(values: Mapping[str, Any]) -> None:
    """Write settings of the process."""
    for name, value in values.items():
        _SETTINGS[name].write(value)


class RankSettings:
    """The changes of one rank to the process's settings, which apply only while the rank runs.

    Ranks in lockstep alternate. Without this, one rank's `with torch.autograd.detect_anomaly():` would change the
    settings of the others.
    """

    def __init__(self) -> None:
        self.changes: dict[str, Any] = {}
        self.before: dict[str, Any] = {}

    def apply(self) -> None:
        """Apply the rank's changes, when it starts to run."""
        self.before = read_settings()
        write_settings(self.changes)

    def undo(self) -> Iterable[str]:
        """Record and undo the rank's changes, when it stops running; return the names of the changed settings."""
        self.changes = {name: value for name, value in read_settings().items() if value != self.before[name]}
        write_settings({name: self.before[name] for name in self.changes})
        return self.changes.keys()
