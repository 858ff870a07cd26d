"""Private torch APIs about a thread's switches and the process's, and about process groups.

A rank in lockstep begins with its caller's switches, has for itself what it switches, and leaves all as it was.
All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_state.py` says which one broke when torch changes.
"""

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.utils import _device, _python_dispatch

__all__ = [
    "OwnSettings",
    "c10d",
    "default_store",
    "group_of",
    "load_forward_mode",
    "put_settings",
    "settings",
    "thread_state",
]

# Private torch APIs about process groups: functional collectives, groups by name, the store of the world.
#
# All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.


c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""

group_of: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
"""Returns the process group of a name, as collectives are given it."""


def default_store() -> torch.distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store that the processes of the world have in common."""
    return distributed_c10d._get_default_store()


# ---------------------------------------------------------------- a thread's own


# Private torch APIs about switches, for ranks that are threads: a thread's own switches, and those of the process.


def thread_state() -> Callable[[], Any]:
    """Take down what of torch's state is a thread's own, and return a context manager that sets it in another.

    Grad mode, inference mode, autocast, the modes of torch functions and of operations (such as `torch.device("meta")`
    and `FlopCounterMode`), the hooks of saved tensors, and the number of threads. The other thread gets its own back,
    whatever it switched meanwhile. `SETTINGS` are the process's.
    """
    grad, forward, inference = torch.is_grad_enabled(), _forward(), torch.is_inference_mode_enabled()
    casts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES]
    cache, threads = torch.is_autocast_cache_enabled(), torch.get_num_threads()
    functions, operations = _function_modes(), _operation_modes()
    hooks, refused = _saved_tensor_hooks(), _refusal_of_hooks()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    @contextmanager
    def inherit() -> Iterator[None]:
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
            stack.enter_context(_with_saved_tensor_hooks(hooks, refused))
            yield

    return inherit


def load_forward_mode() -> None:
    """Load what torch loads at the first forward-mode derivative of a process.

    From torch 2.15 on that warns of `torch.jit.script`, which torch itself uses there: a FutureWarning, so users would
    see it. This function can go when torch no longer uses it.
    """
    if not __debug__ or os.environ.get("PYTORCH_JIT", "1") != "1":  # as torch asks itself
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", FutureWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


_c: Any = torch._C
DEVICES = ("cpu", "cuda")  # those of autocast

_forward: Callable[[], bool] = _c._is_fwd_grad_enabled
_function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
_operation_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
_refusal_of_hooks: Callable[[], str | None] = _c._autograd._saved_tensors_hooks_get_disabled_error_message


def _saved_tensor_hooks() -> Any:
    """Return the pair of hooks that packs and unpacks what is saved now, or None."""
    return _c._autograd._top_saved_tensors_default_hooks(True)


@contextmanager
def _with_function_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Have exactly these modes; those that the thread had come back."""
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
def _with_saved_tensor_hooks(hooks: Any, refused: str | None) -> Iterator[None]:
    """Have these hooks, of which only the innermost count, or none with this message; then none."""
    if hooks is not None:
        _c._autograd._push_saved_tensors_default_hooks(*hooks)
    if refused is not None:
        _c._autograd._saved_tensors_hooks_disable(refused)
    try:
        yield
    finally:
        _c._autograd._saved_tensors_hooks_enable()
        while _saved_tensor_hooks() is not None:
            _c._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def _with_default_device(context: Any) -> Iterator[None]:
    """Have what `torch.set_default_device` wrote down; the mode itself is one of the functions'."""
    before = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = context
    try:
        yield
    finally:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = before


# ---------------------------------------------------------------- the process's


class Setting(NamedTuple):
    """A switch that all threads share: how it is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str | None:
    """Return the precision of float32 products; None where it was set by backend, and torch reads it no more."""
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


SETTINGS = {
    "anomaly mode": Setting(_anomaly_mode, lambda x: torch.set_anomaly_enabled(*x)),
    "deterministic algorithms": Setting(
        _deterministic, lambda x: torch.use_deterministic_algorithms(x[0], warn_only=x[1])
    ),
    "filling of empty tensors": Setting(
        _c._get_deterministic_fill_uninitialized_memory, _c._set_deterministic_fill_uninitialized_memory
    ),
    "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": Setting(lambda: _device.CURRENT_DEVICE, _write_default_device),
    "precision of float32 products": Setting(_matmul_precision, _write_matmul_precision),
    "flash attention": Setting(_c._get_flash_sdp_enabled, _c._set_sdp_use_flash),
    "attention in little memory": Setting(_c._get_mem_efficient_sdp_enabled, _c._set_sdp_use_mem_efficient),
    "attention by products": Setting(_c._get_math_sdp_enabled, _c._set_sdp_use_math),
    "attention by cudnn": Setting(_c._get_cudnn_sdp_enabled, _c._set_sdp_use_cudnn),
    "attention by others": Setting(_c._get_overrideable_sdp_enabled, _c._set_sdp_use_overrideable),
    "order of attention's kernels": Setting(_c._get_sdp_priority_order, _c._set_sdp_priority_order),
    "cudnn": Setting(_c._get_cudnn_enabled, _c._set_cudnn_enabled),
    "cudnn's choice by trial": Setting(_c._get_cudnn_benchmark, _c._set_cudnn_benchmark),
    "cudnn's determinism": Setting(_c._get_cudnn_deterministic, _c._set_cudnn_deterministic),
    "mkldnn": Setting(_c._get_mkldnn_enabled, _c._set_mkldnn_enabled),
    "checks of sparse tensors": Setting(torch.sparse.check_sparse_tensor_invariants.is_enabled, _check_sparse),
    "repeated warnings": Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
}
"""What torch switches for the whole process. Not its random numbers: ranks draw from them one after the other."""


def settings() -> dict[str, Any]:
    """Read all settings of the process."""
    return {name: setting.read() for name, setting in SETTINGS.items()}


def put_settings(values: Mapping[str, Any]) -> None:
    """Write settings of the process."""
    for name, value in values.items():
        SETTINGS[name].write(value)


class OwnSettings:
    """What one rank has set of the process's settings: it is put on for the rank's turn, and taken off after it.

    So ranks whose turns alternate do not undo one another's, as `with torch.autograd.detect_anomaly():` would.
    """

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}
        self.outside: dict[str, Any] = {}

    def put_on(self) -> None:
        """Begin a turn."""
        self.outside = settings()
        put_settings(self.own)

    def take_off(self) -> Iterable[str]:
        """End a turn, and leave the settings as it found them; return the names of those that are the rank's own."""
        self.own = {name: value for name, value in settings().items() if value != self.outside[name]}
        put_settings({name: self.outside[name] for name in self.own})
        return self.own.keys()
