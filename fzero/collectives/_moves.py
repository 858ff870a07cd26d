"""Moves: copies of a tensor from device memory to host memory, and back. Each is the transpose of the other.

| row | forward | transpose |
| --- | --- | --- |
| to_host | copy a tensor from a device to host memory | to_device |
| to_device | copy a tensor from host memory to a device | to_host |

On a machine without accelerators a move still is a copy, and one operation of a graph. So graphs, plans and laws are
the same on every machine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero.collectives._table import NO_AXIS, DeviceOptions, LinearMap, Tensors, add_row, apply

__all__ = ["PendingCopy", "start_to_host", "to_device", "to_host", "wait_to_host"]


@torch.library.custom_op("fzero::to_host", mutates_args=())
def _to_host(x: torch.Tensor) -> torch.Tensor:
    return _empty_on_host(x).copy_(x)


@torch.library.custom_op("fzero::to_device", mutates_args=())
def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":  # a copy from pageable memory would wait for all of the device's work
        x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x, non_blocking=True)


def _empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor; pinned for a GPU's tensor, which makes the copy twice as fast."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")


@_to_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else "cpu")


@_to_device.register_fake
def _(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else device)


def _add_row(name: str, transpose: str, move: Callable[[torch.Tensor, DeviceOptions], torch.Tensor]) -> None:
    def moved(_: Any, options: DeviceOptions, xs: Tensors) -> Tensors:
        return [move(x, options) for x in xs]

    add_row(LinearMap(name=name, wire="", stacked=moved, local=moved, transpose=transpose, replicated=False))


_add_row("to_host", "to_device", lambda x, options: _to_host(x))
_add_row("to_device", "to_host", lambda x, options: _to_device(x, options.device))


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into host memory, differentiably. In a jitted step it is one operation, whose bytes a plan counts.

    A tensor that is in host memory already, as on a machine without accelerators, is copied too.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_host(torch.ones(2))
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_host", NO_AXIS.binding, DeviceOptions(x.device), x)[0]


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from host memory to a device, differentiably: the transpose of `to_host`.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_device(fzero.collectives.to_host(torch.ones(2)), "cpu")
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_device", NO_AXIS.binding, DeviceOptions(torch.device(device)), x)[0]


class PendingCopy(NamedTuple):
    """A copy to the host that may be in progress.

    Attributes:
        value: the copy in host memory; do not read it before `event`.
        event: the event after which the copy is complete; None if it is complete already.
    """

    value: torch.Tensor
    event: torch.Event | None


def start_to_host(x: torch.Tensor) -> PendingCopy:
    """Start a copy to the host, after the device's work so far, and return without waiting for it."""
    return _enqueued(x)


def _enqueued(x: torch.Tensor) -> PendingCopy:
    value = _empty_on_host(x).copy_(x, non_blocking=True)
    if x.device.type != "cuda":
        return PendingCopy(value, None)
    return PendingCopy(value, torch.cuda.current_stream(x.device).record_event())


def wait_to_host(coming: PendingCopy) -> torch.Tensor:
    """Wait for a copy to the host, and return it."""
    if coming.event is not None:
        coming.event.synchronize()
    return coming.value
