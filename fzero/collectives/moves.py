"""Moves: a tensor's way from the device's memory to the host's, and back. Each is the transpose of the other.

| row | forward | transpose |
| --- | --- | --- |
| to_host | a tensor on a device to its copy in host memory | to_device |
| to_device | a tensor in host memory to its copy on a device | to_host |

Where both are one memory a move still is a copy, and one operation of a graph. So graphs, plans and laws are the same
on every machine.
"""

from collections.abc import Callable
from typing import Any

import torch

from fzero.collectives.table import NO_AXIS, OnDevice, Row, Tensors, add_row, apply

__all__ = ["to_device", "to_host"]


@torch.library.custom_op("fzero::to_host", mutates_args=())
def _down(x: torch.Tensor) -> torch.Tensor:
    staged = x.device.type == "cuda"  # a copy from there takes twice the time into memory that may be paged out
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=staged).copy_(x)


@torch.library.custom_op("fzero::to_device", mutates_args=())
def _up(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x)


@_down.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else "cpu")


@_up.register_fake
def _(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else device)


def _add_row(name: str, transpose: str, move: Callable[[torch.Tensor, OnDevice], torch.Tensor]) -> None:
    def moved(_: Any, options: OnDevice, xs: Tensors) -> Tensors:
        return [move(x, options) for x in xs]

    add_row(Row(name=name, wire="", stacked=moved, local=moved, transpose=transpose, replicated=False))


_add_row("to_host", "to_device", lambda x, options: _down(x))
_add_row("to_device", "to_host", lambda x, options: _up(x, options.device))


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into host memory, differentiably; in a jitted step it is one operation, whose bytes a plan counts.

    Where the tensor is in host memory already, as on a machine without accelerators, it is copied, too.

    Example:
        >>> import fzero
        >>> fzero.to_host(torch.ones(2))
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_host", NO_AXIS.binding, OnDevice(x.device), x)[0]


def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from host memory onto a device, differentiably: the transpose of `to_host`.

    Example:
        >>> import fzero
        >>> fzero.to_device(fzero.to_host(torch.ones(2)), "cpu")
        tensor([1., 1.])
    """
    return apply(NO_AXIS.token, "to_device", NO_AXIS.binding, OnDevice(torch.device(device)), x)[0]
