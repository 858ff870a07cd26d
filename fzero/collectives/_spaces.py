"""Move tensors between device and host memory, at once or beside the device's work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero._torch import copy_to_device
from fzero._torch.types import Tensors
from fzero._tracebacks import api_boundary
from fzero.collectives._sums import check_dim
from fzero.collectives._table import NO_AXIS, DeviceOptions, LinearMap, RankOperation, add_rows, apply

__all__ = ["start_to_host", "to_device", "to_host", "wait_to_host"]


@torch.library.custom_op("fzero::to_host", mutates_args=())
def _to_host(x: torch.Tensor) -> torch.Tensor:
    return _empty_on_host(x).copy_(x)


@torch.library.custom_op("fzero::to_device", mutates_args=())
def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return copy_to_device(x, device)


def _empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor; pinned for an accelerator's, which makes the copy twice as fast."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu")


@_to_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else "cpu")


@_to_device.register_fake
def _(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.new_empty(x.shape, device="meta" if x.is_meta else device)


def _per_tensor(move: Callable[[torch.Tensor, DeviceOptions], torch.Tensor]) -> RankOperation:
    def move_all(_: Any, options: DeviceOptions, xs: Tensors) -> Tensors:
        return [move(x, options) for x in xs]

    return RankOperation("", all_ranks=move_all, local=move_all)


add_rows(
    LinearMap("to_host", _per_tensor(lambda x, options: _to_host(x)), "to_device"),
    LinearMap("to_device", _per_tensor(lambda x, options: _to_device(x, options.device)), "to_host"),
)


@api_boundary
def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into host memory, differentiably. In a jitted step it is one operation, whose bytes a plan counts.

    A tensor that is in host memory already, as on a machine without accelerators, is copied too.

    Raises:
        TypeError: if `x` is not a tensor, such as a box or a tree of tensors.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_host(torch.ones(2))
        tensor([1., 1.])
    """
    check_dim("to_host", x, 0, min_ndim=0)
    return apply(NO_AXIS.token, "to_host", NO_AXIS.binding, DeviceOptions(x.device), x)[0]


@api_boundary
def to_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor from host memory to a device, differentiably: the transpose of `to_host`.

    Raises:
        TypeError: if `x` is not a tensor, such as a box or a tree of tensors.

    Example:
        >>> import fzero
        >>> fzero.collectives.to_device(fzero.collectives.to_host(torch.ones(2)), "cpu")
        tensor([1., 1.])
    """
    check_dim("to_device", x, 0, min_ndim=0)
    return apply(NO_AXIS.token, "to_device", NO_AXIS.binding, DeviceOptions(torch.device(device)), x)[0]


class _PendingCopy(NamedTuple):
    """A copy to the host that may be in progress.

    Attributes:
        value: the copy in host memory; do not read it before `event`.
        event: the event after which the copy is complete; None if it is complete already.
    """

    value: torch.Tensor
    event: torch.Event | None


def start_to_host(x: torch.Tensor) -> _PendingCopy:
    """Start a copy to the host, after the device's work so far, and return without waiting for it."""
    return _enqueue_copy(x)


def _enqueue_copy(x: torch.Tensor) -> _PendingCopy:
    value = _empty_on_host(x).copy_(x, non_blocking=True)
    if x.device.type == "cpu":
        return _PendingCopy(value, None)
    return _PendingCopy(value, torch.accelerator.current_stream(x.device).record_event())


def wait_to_host(coming: _PendingCopy) -> torch.Tensor:
    """Wait for a copy to the host, and return it."""
    if coming.event is not None:
        coming.event.synchronize()
    return coming.value
