"""Private torch APIs about memory: which tensors lie side by side in one buffer, and such tensors.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_buffers.py` says which one broke when torch changes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

__all__ = ["Buffer", "buffers_of", "in_buffers", "storage_id", "view_of"]


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share memory."""
    return x.untyped_storage()._cdata


class Buffer(NamedTuple):
    """Tensors of one dtype that lie side by side and fill their memory.

    Attributes:
        members: the positions of the tensors in a list, in the order in which they lie.
        offsets: where each begins, in elements.
        numel: of all.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def buffers_of(tensors: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Find the buffers that two or more of these tensors, each contiguous, fill without gaps and overlaps."""
    by_storage: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        by_storage.setdefault(storage_id(x), []).append(i)
    if len(by_storage) == len(tensors):
        return ()
    found = [_buffer(tensors, members) for members in by_storage.values() if len(members) > 1]
    return tuple([buffer for buffer in found if buffer is not None])


def _buffer(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> Buffer | None:
    first = tensors[members[0]]
    plain = all(tensors[i].is_contiguous() and tensors[i].dtype == first.dtype for i in members)
    if not plain or any(tensors[i].is_conj() or tensors[i].is_neg() for i in members):
        return None
    # an empty one comes before what begins where it lies
    ordered = sorted(members, key=lambda i: (tensors[i].storage_offset(), tensors[i].numel(), i))
    offsets, end = [], 0
    for i in ordered:
        if tensors[i].storage_offset() != end:
            return None
        offsets.append(end)
        end += tensors[i].numel()
    fills = end * first.element_size() == first.untyped_storage().nbytes()
    return Buffer(tuple(ordered), tuple(offsets), end) if fills else None


def in_buffers(
    tensors: Sequence[torch.Tensor], empty: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
) -> list[torch.Tensor]:
    """Make other tensors of the same shapes and strides, which lie side by side where the given ones do.

    Args:
        tensors: the given ones.
        empty: makes one like a tensor, of a shape and strides.
    """
    found: dict[int, torch.Tensor] = {}
    for buffer in buffers_of(tensors):
        whole = empty(tensors[buffer.members[0]], [buffer.numel], [1])
        for i, at in zip(buffer.members, buffer.offsets, strict=True):
            found[i] = view_of(whole, at, tensors[i].shape)
    return [found[i] if i in found else empty(x, x.shape, x.stride()) for i, x in enumerate(tensors)]


def view_of(buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over a part of a buffer `[n]` that starts at `offset`; torch does not take it for a view."""
    numel = torch.Size(shape).numel()
    return buffer.narrow(0, offset, numel).view(shape).data
