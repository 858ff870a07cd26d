"""prefetch: the copies of a batch to the device run beside the step before it."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from fzero import tree
from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.ranks import Mesh

__all__ = ["prefetch"]


_T = TypeVar("_T")


@api_boundary
def prefetch(batches: Iterable[_T], mesh: Mesh, ahead: int = 1) -> Iterator[_T]:
    """Take batches before they are used, so that their copies to the device run beside the steps before them.

    On the CPU nothing is copied, and the batches come as they are. On an accelerator `ahead` more batches lie in its
    memory, which no plan counts.

    Args:
        batches: the batches, such as `data.steps()`, or `map(mesh.split, loader)`; also pairs of a number and a batch.
        mesh: the ranks.
        ahead: the number of batches to take before they are used, 1 or more.

    Returns:
        An iterator of the same batches, in order.

    Raises:
        ValueError: if `ahead` is below 1.
        TypeError: if `mesh` is not a mesh, or `batches` cannot be iterated over.

    Example:
        >>> import fzero
        >>> mesh = fzero.mesh(dp=2)
        >>> data = fzero.data.batches(torch.arange(10), mesh, global_batch=4)
        >>> [i for i, batch in prefetch(data.steps(0, 3), mesh)]
        [0, 1, 2]
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}: expected a mesh, as in fzero.data.prefetch(batches, mesh)")
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):  # either of which `iter` takes
        batches_text = tree.show(batches)
        raise TypeError(f"batches is {batches_text}: expected several, such as data.steps() or map(mesh.split, loader)")
    check_int("ahead", ahead, 1, "a number of batches")
    return iter(batches) if mesh.device.type == "cpu" else _copy_ahead(iter(batches), mesh.device, ahead)


def _copy_ahead(batches: Iterator[_T], device: torch.device, ahead: int) -> Iterator[_T]:
    """Copy batches on a stream of their own. The caller's stream waits for a batch's copies only when it is used.

    That stream waits for what the caller queued before a batch is taken: a batch may be made of values on the device
    that the caller still computes. Copies then run beside the step that the caller queues next.
    """
    stream = torch.Stream(device)
    pending: deque[tuple[_T, torch.Event]] = deque()

    def take(count: int) -> None:
        stream.wait_stream(torch.accelerator.current_stream(device))
        for _ in range(count):
            with stream:
                for batch in islice(batches, 1):
                    pending.append((batch, stream.record_event()))

    take(ahead)
    while pending:
        batch, event = pending.popleft()
        take(1)
        current = torch.accelerator.current_stream(device)
        current.wait_event(event)
        for x in tree.tensors(batch):
            if x.device == device:
                x.record_stream(current)  # its memory is not reused before the caller's work on it is done
        yield batch
