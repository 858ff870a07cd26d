"""Meters: what one call of a step takes, by a device's own counters, without waiting for the device."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero import _torch

__all__ = ["Meter", "Taken", "meter_of"]


class Taken(NamedTuple):
    """What one call took.

    Attributes:
        seconds: returns how long it ran, on its device; waits for its end.
        waited: returns how long the device had nothing of the step to do before it; 0 for the first. To be asked
            when the call has ended.
        is_over: returns whether the device has come to its end.
        added_bytes: the most that it held at once beside what was there before; None if that was not measured.
        before_bytes: what was there before; None where no counter says so.
        reserved_bytes: the most that the device's allocator held, used or not; None where there is no such.
        retries: how often the allocator had to give its cache back, since the process began.
    """

    seconds: Callable[[], float]
    waited: Callable[[], float]
    is_over: Callable[[], bool]
    added_bytes: int | None = None
    before_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0


class Meter:
    """Measures calls of a step on a CPU: by its clock, and by the events of torch's allocator."""

    def __init__(self) -> None:
        self._ended: float | None = None

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Taken]:
        """Run a call.

        Args:
            call: the step with its arguments.
            memory: whether its peak is measured, which takes some milliseconds.
        """
        began = time.perf_counter()
        waited = 0.0 if self._ended is None else began - self._ended
        added = None
        if memory:
            with _torch.allocations() as found:
                out = call()
            added = found.peak
        else:
            out = call()
        self._ended = ended = time.perf_counter()
        return out, Taken(lambda: ended - began, lambda: waited, lambda: True, added)


class _CudaMeter(Meter):
    """Measures calls on a GPU: by events on its stream, and by the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._last: Any = None  # the event of the last call's end

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Taken]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = torch.cuda.memory_allocated(self._device) if memory else None
        if memory:
            torch.cuda.reset_peak_memory_stats(self._device)
        began.record(torch.cuda.current_stream(self._device))
        out = call()
        ended.record(torch.cuda.current_stream(self._device))
        last, self._last = self._last, ended

        def seconds() -> float:
            ended.synchronize()
            return began.elapsed_time(ended) / 1e3

        taken = Taken(
            seconds,
            lambda: 0.0 if last is None else last.elapsed_time(began) / 1e3,
            ended.query,
        )
        if before is not None:
            stats = torch.cuda.memory_stats(self._device)
            taken = taken._replace(
                added_bytes=stats["allocated_bytes.all.peak"] - before,
                before_bytes=before,
                reserved_bytes=stats["reserved_bytes.all.peak"],
                retries=stats["num_alloc_retries"],
            )
        return out, taken


def meter_of(tensors: list[torch.Tensor]) -> Meter:
    """Return a meter for the device that tensors lie on."""
    device = next((x.device for x in tensors if x.is_cuda), None)
    return Meter() if device is None else _CudaMeter(device)
