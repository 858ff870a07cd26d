"""Meters measure one call of a step with the counters of its device, without waiting for the device."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero import _torch

__all__ = ["Measurement", "Meter", "make_meter"]


class Measurement(NamedTuple):
    """The measurement of one call.

    Attributes:
        seconds: a function that waits for the end of the call, and returns how long it ran on its device.
        idle_seconds: a function that returns how long the device idled between the last call and this one; 0 for the
            first. Call it after the call has ended.
        is_over: a function that returns whether the device has finished the call.
        added_bytes: the most bytes alive at once, in addition to those before the call; None if not measured.
        before_bytes: the bytes alive before the call; None if there is no counter.
        reserved_bytes: the most bytes that the caching allocator reserved; None without such an allocator.
        retries: how often the allocator freed its cache and tried again, since the process began.
    """

    seconds: Callable[[], float]
    idle_seconds: Callable[[], float]
    is_over: Callable[[], bool]
    added_bytes: int | None = None
    before_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0


class Meter:
    """Measures calls of a step on a CPU, by the clock and by the events of torch's allocator."""

    def __init__(self) -> None:
        self._last_end: float | None = None

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Measurement]:
        """Run a call.

        Args:
            call: the step, bound to its arguments.
            memory: whether to measure its peak, which takes some milliseconds.
        """
        start = time.perf_counter()
        idle = 0.0 if self._last_end is None else start - self._last_end
        added_bytes = None
        if memory:
            with _torch.allocations() as record:
                out = call()
            added_bytes = record.peak
        else:
            out = call()
        self._last_end = end = time.perf_counter()
        return out, Measurement(lambda: end - start, lambda: idle, lambda: True, added_bytes)


class _DeviceMeter(Meter):
    """Measures calls on an accelerator, by events on its stream and by the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._last: Any = None  # the event of the last call's end

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Measurement]:
        """Call a function between two events of the device, and return its result and a measurement to read later."""
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        bytes_before = torch.accelerator.memory_allocated(self._device) if memory else None
        if memory:
            torch.accelerator.reset_peak_memory_stats(self._device)
        start.record(torch.accelerator.current_stream(self._device))
        out = call()
        end.record(torch.accelerator.current_stream(self._device))
        previous_end, self._last = self._last, end

        def seconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        measurement = Measurement(
            seconds,
            lambda: 0.0 if previous_end is None else previous_end.elapsed_time(start) / 1e3,
            end.query,
        )
        if bytes_before is not None:
            stats = torch.accelerator.memory_stats(self._device)
            measurement = measurement._replace(
                added_bytes=stats["allocated_bytes.all.peak"] - bytes_before,
                before_bytes=bytes_before,
                reserved_bytes=stats["reserved_bytes.all.peak"],
                retries=stats["num_alloc_retries"],
            )
        return out, measurement


def make_meter(tensors: list[torch.Tensor]) -> Meter:
    """Return a meter for the device that tensors lie on."""
    device = next((x.device for x in tensors if _torch.is_accelerator(x.device)), None)
    return Meter() if device is None else _DeviceMeter(device)
