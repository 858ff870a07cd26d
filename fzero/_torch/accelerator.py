"""This machine's accelerator, a GPU of any maker, by `torch.accelerator`, which torch 2.11 to 2.15 have."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from fzero._torch.running_transforms import is_tracing

__all__ = [
    "autocast_kinds",
    "copy_to_device",
    "empty_cache",
    "fork_random_state",
    "is_accelerator",
    "local_accelerator",
    "tensor_on",
    "wait_for_device",
    "without_autocast",
    "without_autocast_cache",
]


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator, and neither the host nor torch's device without memory."""
    return device.type not in ("cpu", "meta")


def local_accelerator() -> torch.device | None:
    """Return this process's accelerator with its number; None if the machine has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.device(accelerator.type, torch.accelerator.current_device_index())


def wait_for_device(device: torch.device | None = None) -> None:
    """Wait until an accelerator has done its work.

    Args:
        device: the accelerator, or the host, which is not waited for; by default this process's accelerator, if it has
            one.
    """
    if is_accelerator(device) if device is not None else torch.accelerator.is_available():
        torch.accelerator.synchronize(device)


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor into new memory of a device. The host does not wait, as it would for pageable memory."""
    if is_accelerator(device) and not x.is_pinned():
        x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x, non_blocking=True)


def tensor_on(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of numbers on a device, as `torch.tensor` does; the host does not wait for the copy.

    A trace has it as a constant on the device.
    """
    if not is_accelerator(device) or is_tracing():
        return torch.tensor(values, dtype=dtype, device=device)
    return copy_to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def empty_cache(device: torch.device) -> None:
    """Give an accelerator the memory back that torch's allocator keeps, and that no tensor uses; a host has none."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def autocast_kinds() -> tuple[str, str]:
    """Return the types of the devices whose autocast settings a trace notes: the host's and the accelerator's."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu", "cuda" if accelerator is None else accelerator.type)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run code with autocast off, as a graph that holds its casts; it costs nothing where autocast is off."""
    with ExitStack() as stack:
        for kind in autocast_kinds():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast cast a tensor at each use, so that the gradients of its uses are summed in its own dtype.

    With the cache they are summed in half precision, but only for tensors that autograd takes for leaves. So the
    numbers would depend on how a step runs: with remat, simulated, or in a trace.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def fork_random_state(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Keep the random states of the host and of the accelerators among devices, for a `with` block."""
    accelerators = sorted({d for d in devices if is_accelerator(d)}, key=str)
    return torch.random.fork_rng(accelerators, device_type=accelerators[0].type if accelerators else "cuda")
