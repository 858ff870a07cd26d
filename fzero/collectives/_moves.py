"""Moves: a tensor's way from the device's memory to the host's, and back. Each is the transpose of the other.

| row | forward | transpose |
| --- | --- | --- |
| to_host | a tensor on a device to its copy in host memory | to_device |
| to_device | a tensor in host memory to its copy on a device | to_host |

Where both are one memory a move still is a copy, and one operation of a graph. So graphs, plans and laws are the same
on every machine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero.collectives._table import NO_AXIS, LinearMap, OnDevice, Tensors, add_row, apply

__all__ = ["Coming", "arrived", "on_its_way", "to_device", "to_host"]


@torch.library.custom_op("fzero::to_host", mutates_args=())
def _down(x: torch.Tensor) -> torch.Tensor:
    return _below(x).copy_(x)


@torch.library.custom_op("fzero::to_device", mutates_args=())
def _up(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":  # from memory that may be paged out a copy would wait for all of the device's work
        x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x, non_blocking=True)


def _below(x: torch.Tensor) -> torch.Tensor:
    """Make memory on the host for a tensor; one on a GPU is copied twice as fast where it cannot be paged out."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")


@_down.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else "cpu")


@_up.register_fake
def _(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else device)


def _add_row(name: str, transpose: str, move: Callable[[torch.Tensor, OnDevice], torch.Tensor]) -> None:
    def moved(_: Any, options: OnDevice, xs: Tensors) -> Tensors:
        return [move(x, options) for x in xs]

    add_row(LinearMap(name=name, wire="", stacked=moved, local=moved, transpose=transpose, replicated=False))


_add_row("to_host", "to_device", lambda x, options: _down(x))
_add_row("to_device", "to_host", lambda x, options: _up(x, options.device))


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into host memory, differentiably; in a jitted step it is one operation, whose bytes a plan counts.

    Where the tensor is in host memory already, as on a machine without accelerators, it is copied, too.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_host(torch.ones(2))
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_host", NO_AXIS.binding, OnDevice(x.device), x)[0]


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from host memory onto a device, differentiably: the transpose of `to_host`.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_device(fzero.collectives.to_host(torch.ones(2)), "cpu")
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_device", NO_AXIS.binding, OnDevice(torch.device(device)), x)[0]


class Coming(NamedTuple):
    """A copy to the host that may be on its way.

    Attributes:
        value: in host memory; not to be read before it has arrived.
        event: after which it has; None if it is there.
    """

    value: torch.Tensor
    event: torch.Event | None


def on_its_way(x: torch.Tensor) -> Coming:
    """Start a copy to the host behind the device's work so far, and do not wait for it."""
    return _enqueued(x)


def _enqueued(x: torch.Tensor) -> Coming:
    value = _below(x).copy_(x, non_blocking=True)
    if x.device.type != "cuda":
        return Coming(value, None)
    return Coming(value, torch.cuda.current_stream(x.device).record_event())


def arrived(coming: Coming) -> torch.Tensor:
    """Wait for a copy to the host."""
    if coming.event is not None:
        coming.event.synchronize()
    return coming.value
