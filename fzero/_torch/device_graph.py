"""Graphs of a device (CUDA graphs): the work of a function is recorded once, and then started as a whole.

`torch.cuda.CUDAGraph` exists in torch 2.11 to 2.15. `torch.accelerator` has no graphs in 2.11.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

__all__ = ["DeviceGraph", "can_record", "copy_together", "has_recordable_collectives"]


class DeviceGraph:
    """The recorded work of a function: its kernels, copies within the device and collectives.

    Attributes:
        results: the results of the function; each run writes into these tensors.
    """

    def __init__(self, run: Callable[[], Any], pool: "DeviceGraph | None" = None) -> None:
        """Record a function. Nothing runs.

        Args:
            run: the function. It has run before, so that libraries are loaded and communicators are made.
            pool: another graph whose memory this one may share. The two must not run at the same time.

        Raises:
            RuntimeError: if the function waits for the device, or does something else that cannot be recorded.
        """
        self._graph = torch.cuda.CUDAGraph()
        memory = None if pool is None else pool._graph.pool()
        # other threads, such as those that watch collectives, may call the runtime meanwhile
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self.results = run()

    def run(self) -> None:
        """Start the recorded work on the current stream."""
        self._graph.replay()


def can_record(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any of these tensors lies on a device that has graphs."""
    return any(x.device.type == "cuda" for x in tensors)


def has_recordable_collectives(group: Any, device: torch.device) -> bool:
    """Return whether a process group's collectives on a device run there, as NCCL's do; gloo's run on the host."""
    process_group: Any = distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportPrivateImportUsage]
    return process_group._get_backend(device).name() != "gloo"


def copy_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes and dtypes, by one kernel for each dtype."""
    for dtype in {x.dtype for x in targets}:
        pairs = [(target, x) for target, x in zip(targets, sources, strict=True) if target.dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [x for _, x in pairs], non_blocking=True)  # pyright: ignore
