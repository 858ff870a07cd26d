"""Everything that reaches CUDA while a function runs: kernels, products, copies, waits, collectives, in order.

Without a GPU the log is that of the library which `tests.cuda.build` makes. On a GPU it is the profiler's, translated
into the same words.
"""

import ctypes
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.cuda import _gpu_trace

WAITS = ("device wait", "stream wait", "event wait", "copy and wait")


class Event(NamedTuple):
    """A call of CUDA, cuBLAS or NCCL.

    Attributes:
        kind: "kernel", "product", "copy", "fill", "collective", "record event", "wait event", one of `WAITS`, ...
        stream: the stream's handle, or "" if it is not known.
        bytes: of a copy, a fill, a collective, an allocation; the event's handle of "record event" and "wait event";
            the address of "touch" (a collective or a copy reads or writes there), "take block" and "free block" (the
            caching allocator's).
        name: of a kernel, a product or a collective; from where to where of a copy.
    """

    kind: str
    stream: str
    bytes: int
    name: str


def without_gpu() -> bool:
    """Return whether this process runs on the CUDA without a GPU."""
    return "libcudart_log" in os.environ.get("LD_PRELOAD", "")


def leave_out_cudnn() -> None:
    """Let torch do without cuDNN on the CUDA without a GPU: it asks the card for more than there is."""
    if without_gpu():
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.enabled = False


def record(run: Callable[[], Any]) -> tuple[Any, list[Event]]:
    """Run a function, and return its result and what reached CUDA meanwhile."""
    return _log(run) if without_gpu() else _profile(run)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the log, and let torch's allocator note the blocks that it gives and takes back."""
    library = ctypes.CDLL(None)
    note = library.cuda_log_note
    note.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    take, free = b"take block", b"free block"  # the log keeps these pointers
    _gpu_trace.register_callback_for_memory_allocation(lambda address: note(take, None, address, b""))
    _gpu_trace.register_callback_for_memory_deallocation(lambda address: note(free, None, address, b""))
    torch._C._activate_gpu_trace()
    return library


def note(kind: str, size: int, name: str) -> None:
    """Note something of one's own in the log of the CUDA without a GPU."""
    _library().cuda_log_note(_keep_text(kind), None, size, _keep_text(name))


@functools.cache
def _keep_text(text: str) -> bytes:
    """Return bytes that live as long as the process, since the log keeps pointers."""
    return text.encode()


def _log(run: Callable[[], Any]) -> tuple[Any, list[Event]]:
    library = _library()
    library.cuda_log_start()
    out = run()
    library.cuda_log_stop()
    with tempfile.NamedTemporaryFile("r") as file:
        if library.cuda_log_write(file.name.encode()):
            raise OSError(f"the log cannot be written to {file.name}")
        rows = [line.rstrip("\n").split("\t") for line in file]
    return out, [Event(kind, stream, int(size), name) for kind, stream, size, name in rows]


CALLS = {
    "cudaDeviceSynchronize": "device wait",
    "cudaStreamSynchronize": "stream wait",
    "cudaEventSynchronize": "event wait",
    "cudaMemcpy": "copy and wait",
}
PROFILED_COPIES = {
    "Memcpy HtoD (Pageable -> Device)": "pageable to device",
    "Memcpy HtoD (Pinned -> Device)": "pinned to device",
    "Memcpy DtoH (Device -> Pageable)": "device to pageable",
    "Memcpy DtoH (Device -> Pinned)": "device to pinned",
    "Memcpy DtoD (Device -> Device)": "device to device",
}


def _profile(run: Callable[[], Any]) -> tuple[Any, list[Event]]:
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        out = run()
        torch.profiler.record_function("end of the run").__enter__().__exit__(None, None, None)
        torch.cuda.synchronize()
    results = []
    for event in profile.events():
        if event.name == "end of the run":
            break
        results += _translate(event)
    return out, results


def _translate(event: Any) -> list[Event]:
    name, on_device = event.name, event.device_type != torch.autograd.DeviceType.CPU
    if name in CALLS:
        return [Event(CALLS[name], "", 0, "")]
    if not on_device:
        return []
    if name in PROFILED_COPIES:
        return [Event("copy", "", 0, PROFILED_COPIES[name])]
    if name.startswith("Memset"):
        return [Event("fill", "", 0, "")]
    if name.startswith("nccl"):
        return [Event("collective", "", 0, name)]
    is_product = any(word in name.lower() for word in ("gemm", "cutlass", "cublas", "gemv"))
    return [Event("product" if is_product else "kernel", "", 0, name)]


def is_flash_attention(kernel: str) -> bool:
    """Return whether a kernel is one of attention that never holds the matrix of all pairs: flash's or cuDNN's."""
    return "flash" in kernel or "cudnn" in kernel


def waits(events: Sequence[Event]) -> list[str]:
    """Name the calls in which the host waits, and the copies from or to pageable memory, which wait, too."""
    results = [e.kind for e in events if e.kind in WAITS]
    return results + [e.name for e in events if e.kind == "copy" and "pageable" in e.name and "device" in e.name]


def counts(events: Sequence[Event]) -> dict[str, int]:
    """Count the events by kind; collectives and copies by name."""
    named = ("collective", "copy", "capture violation")
    return dict(Counter(f"{e.kind}: {e.name}" if e.kind in named else e.kind for e in events))
