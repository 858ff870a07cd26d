"""Tensors as bytes: views of their memory where it can be read and written directly, else small copies."""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from fzero.layout.elements import elements

__all__ = ["bytes_of", "chunks", "is_direct", "whole_or_chunks"]

CHUNK = 1 << 22  # bytes, of what has to be copied


def bytes_of(x: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor, which lives as long as the view."""
    if not x.numel():
        return memoryview(b"")
    # not by numpy, which need not be installed, and has no bfloat16
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.owner = x
    return memoryview(memory).cast("B")


def is_direct(x: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is its elements in their order, for this process to read and write."""
    return x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def chunks(x: torch.Tensor, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of the elements of a tensor from `start` to before `stop`, in row-major order."""
    if is_direct(x):
        yield bytes_of(x.view(-1)[start:stop])
        return
    step = max(CHUNK // x.element_size(), 1)
    for at in range(start, stop, step):
        for part in whole_or_chunks(x, at, min(at + step, stop)):
            yield bytes_of(part.cpu())


def whole_or_chunks(x: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor from `start` to before `stop`, contiguous: a view, or small copies one by one."""
    if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        yield x.view(-1)[start:stop]
        return
    step = max(CHUNK // x.element_size(), 1)
    for at in range(start, stop, step):
        yield elements(x, at, min(at + step, stop)).resolve_conj().resolve_neg().contiguous()
