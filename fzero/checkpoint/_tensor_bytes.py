"""Tensors as bytes: views of their memory if this process can access it directly, else small copies."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from fzero.sharding import slice_elements

__all__ = ["byte_views", "is_direct", "view_bytes", "view_or_parts"]


_CHUNK_BYTES = 1 << 22  # of a copy


def view_bytes(x: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as bytes. The view keeps the memory alive."""
    if not x.numel():
        return memoryview(b"")
    # not through numpy, which may not be installed and has no bfloat16
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.owner = x
    return memoryview(memory).cast("B")


def is_direct(x: torch.Tensor) -> bool:
    """Return whether this process can read and write a tensor's elements, in order, directly in its memory."""
    return x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def byte_views(x: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements from `start` to before `stop`, in row-major order."""
    if is_direct(x):
        yield view_bytes(x.view(-1)[start:stop])
        return
    step = max(_CHUNK_BYTES // x.element_size(), 1)
    for first in range(start, stop, step):
        for part in view_or_parts(x, first, min(first + step, stop)):
            yield view_bytes(part.cpu())


def view_or_parts(x: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements from `start` to before `stop`, contiguous: one view, or small copies in turn."""
    if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        yield x.view(-1)[start:stop]
        return
    step = max(_CHUNK_BYTES // x.element_size(), 1)
    for first in range(start, stop, step):
        yield slice_elements(x, first, min(first + step, stop)).resolve_conj().resolve_neg().contiguous()
