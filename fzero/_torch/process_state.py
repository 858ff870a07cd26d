"""Private torch APIs about the settings of the process, which all its threads share.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/axes/test_lockstep_state.py` shows which.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _device

from fzero._torch.state import torch_c

__all__ = ["RankSettings", "read_settings", "write_settings"]


class _Setting(NamedTuple):
    """A setting that all threads share: a function that reads it and a function that writes it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _deterministic_settings() -> tuple[bool, bool]:
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
        _deterministic_settings, lambda x: torch.use_deterministic_algorithms(x[0], warn_only=x[1])
    ),
    "deterministic filling of empty tensors": _Setting(
        torch_c._get_deterministic_fill_uninitialized_memory, torch_c._set_deterministic_fill_uninitialized_memory
    ),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": _Setting(lambda: _device.CURRENT_DEVICE, _write_default_device),
    "precision of float32 products": _Setting(_matmul_precision, _write_matmul_precision),
    "flash attention": _Setting(torch_c._get_flash_sdp_enabled, torch_c._set_sdp_use_flash),
    "memory-efficient attention": _Setting(torch_c._get_mem_efficient_sdp_enabled, torch_c._set_sdp_use_mem_efficient),
    "math attention": _Setting(torch_c._get_math_sdp_enabled, torch_c._set_sdp_use_math),
    "cudnn attention": _Setting(torch_c._get_cudnn_sdp_enabled, torch_c._set_sdp_use_cudnn),
    "overrideable attention": _Setting(torch_c._get_overrideable_sdp_enabled, torch_c._set_sdp_use_overrideable),
    "priority of attention kernels": _Setting(torch_c._get_sdp_priority_order, torch_c._set_sdp_priority_order),
    "cudnn": _Setting(torch_c._get_cudnn_enabled, torch_c._set_cudnn_enabled),
    "cudnn benchmark": _Setting(torch_c._get_cudnn_benchmark, torch_c._set_cudnn_benchmark),
    "cudnn deterministic": _Setting(torch_c._get_cudnn_deterministic, torch_c._set_cudnn_deterministic),
    "mkldnn": _Setting(torch_c._get_mkldnn_enabled, torch_c._set_mkldnn_enabled),
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
