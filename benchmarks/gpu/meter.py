"""Meters of a step: the allocator's peaks, on a GPU or a CPU, and the time."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fzero import tree
from fzero._torch import wait_for_device
from fzero._torch.cpu_allocator import allocations

__all__ = ["MB", "Meter", "Peaks", "from_rank_0", "milliseconds"]

MB = 1e6  # bytes
GROUP = 3  # steps between two readings of the clock, so that the host may run ahead as in training


class Peaks(NamedTuple):
    """The most bytes of a step, above what was held when its meter was made.

    Attributes:
        requested: by the tensors.
        allocated: by the allocator's blocks.
        reserved: by the allocator's segments; None on a CPU.
    """

    requested: int
    allocated: int
    reserved: int | None


class Meter:
    """Measures a step. Make it before the step's state.

    Args:
        device: where the step runs.
        rounds: how often its time is taken.
    """

    def __init__(self, device: torch.device, rounds: int = 10) -> None:
        self.device, self.rounds = device, rounds
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_stats()

    def peaks(self, run: Callable[[], Any], state: Any) -> Peaks:
        """Return the peaks of a call; on a CPU those of its operations above the tensors of `state`."""
        gc.collect()
        if self.device.type != "cuda":
            with allocations() as record:
                run()
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tree.tensors(state)}
            peak = (record.peak or 0) + sum(storages.values())
            return Peaks(peak, peak, None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        now = torch.cuda.memory_stats()
        kinds = ("requested_bytes", "allocated_bytes", "reserved_bytes")
        return Peaks(*(now[f"{kind}.all.peak"] - self._before[f"{kind}.all.current"] for kind in kinds))

    def seconds(self, run: Callable[[], Any], most: float = 4.0) -> list[float]:
        """Return the seconds of a call, over rounds of a few calls; fewer rounds if they take more than `most` seconds.

        All ranks make the same number of calls.
        """
        wait_for_device(self.device)
        first = self._round(run)
        more = from_rank_0(min(self.rounds - 1, int(most / (first * GROUP))))
        return [first, *[self._round(run) for _ in range(more)]]

    def _round(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(GROUP):
            run()
        wait_for_device(self.device)
        return (time.perf_counter() - start) / GROUP


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value, which all ranks that exist agree on."""
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def milliseconds(times: list[float]) -> dict[str, Any]:
    """Return a row's columns of times: the median, and the quartiles."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"ms a step": middle * 1e3, "quartiles": f"{low * 1e3:.1f} to {high * 1e3:.1f}"}
