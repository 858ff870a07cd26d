"""Private torch APIs about the memory of tensors: which tensors share it, fill it together, or hold it.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_memory.py` shows which.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Buffer",
    "Memory",
    "buffer_view",
    "count_holders",
    "find_buffers",
    "in_buffers",
    "is_real",
    "storage_id",
    "tensor_memory",
    "tensor_version",
]


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share memory."""
    return x.untyped_storage()._cdata


class Buffer(NamedTuple):
    """Tensors of one dtype that lie side by side and fill their memory.

    Attributes:
        members: the positions of the tensors in a list, in the order of memory.
        offsets: the offset of each tensor, in elements.
        numel: the number of elements of all tensors together.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def find_buffers(tensors: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Return the buffers that two or more of these tensors, all contiguous, fill without gaps and overlaps."""
    by_storage: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        by_storage.setdefault(storage_id(x), []).append(i)
    if len(by_storage) == len(tensors):
        return ()
    buffers = [_find_buffer(tensors, members) for members in by_storage.values() if len(members) > 1]
    return tuple([buffer for buffer in buffers if buffer is not None])


def _find_buffer(tensors: Sequence[torch.Tensor], members: Sequence[int]) -> Buffer | None:
    """Return the order of the members if they fill one memory without gaps, so that one tensor can stand for all."""
    first_member = tensors[members[0]]
    is_plain = all(tensors[i].is_contiguous() and tensors[i].dtype == first_member.dtype for i in members)
    if not is_plain or any(tensors[i].is_conj() or tensors[i].is_neg() for i in members):
        return None
    # an empty tensor comes before a tensor that begins at the same offset
    order = sorted(members, key=lambda i: (tensors[i].storage_offset(), tensors[i].numel(), i))
    offsets = []
    end = 0
    for i in order:
        if tensors[i].storage_offset() != end:
            return None
        offsets.append(end)
        end += tensors[i].numel()
    fills = end * first_member.element_size() == first_member.untyped_storage().nbytes()
    return Buffer(tuple(order), tuple(offsets), end) if fills else None


def in_buffers(
    tensors: Sequence[torch.Tensor], empty: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
) -> list[torch.Tensor]:
    """Return new tensors of the same shapes and strides, which share buffers as `tensors` do.

    Args:
        tensors: the tensors to imitate.
        empty: a function `(tensor, shape, strides)` that returns a new tensor like `tensor`, of this shape and strides.
    """
    members: dict[int, torch.Tensor] = {}
    for buffer in find_buffers(tensors):
        data = empty(tensors[buffer.members[0]], [buffer.numel], [1])
        for i, offset in zip(buffer.members, buffer.offsets, strict=True):
            members[i] = buffer_view(data, offset, tensors[i].shape)
    return [members[i] if i in members else empty(x, x.shape, x.stride()) for i, x in enumerate(tensors)]


def buffer_view(buffer: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over the part of a buffer `[n]` from `offset` on. For torch it is not a view."""
    numel = torch.Size(shape).numel()
    return buffer.narrow(0, offset, numel).view(shape).data


def tensor_version(x: torch.Tensor) -> int | None:
    """Return a number that grows with each in-place write into a tensor; None for inference tensors."""
    return None if x.is_inference() else x._version


class Memory(NamedTuple):
    """The memory of a tensor: a range of bytes of a storage. No other storage gets its number while this exists.

    Attributes:
        storage: the number of the storage.
        first: the first byte.
        stop: the byte after the last.
        reference: a weak reference to the storage, which does not keep the data alive.
    """

    storage: int
    first: int
    stop: int
    reference: StorageWeakRef

    @property
    def is_freed(self) -> bool:
        """Whether the storage was freed."""
        return self.reference.expired()


def tensor_memory(x: torch.Tensor) -> Memory:
    """Return the memory of a tensor. The tensor must have memory, see `is_real`."""
    storage, size = x.untyped_storage(), x.element_size()
    first = int(x.storage_offset())
    last = first + sum([int(n - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True)])
    return Memory(storage._cdata, first * size, (last + 1) * size, StorageWeakRef(storage))


def is_real(x: torch.Tensor) -> bool:
    """Return whether a tensor is strided and holds at least one value in memory."""
    return not isinstance(x, FakeTensor) and not x.is_meta and x.layout is torch.strided and x.numel() > 0


def count_holders(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Count the holders of each tensor's memory: tensors (with itself), autograd graphs, and DLPack capsules.

    The base of a view does not count if only the view keeps it alive.
    """
    return [_count_references(x) for x in tensors]


def _count_references(x: torch.Tensor) -> int:
    users = torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1  # without the storage object of this call
    count = users + x._use_count() - 1  # pyright: ignore[reportAttributeAccessIssue]  # without the tensor's object
    return count - 1 if count > 1 and _keeps_base(x, users) else count


def _keeps_base(x: torch.Tensor, users: int) -> bool:
    """Return whether a tensor is a view, and only views keep its base, of the same memory, alive."""
    base = x._base if x._is_view() else None
    if base is None or storage_id(base) != storage_id(x):
        return False
    max_views = users - 1  # each view holds the base, and so does the base's own object
    uses = base._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    return uses <= max_views + 1 and sys.getrefcount(base) <= _references_alone()


@functools.cache
def _references_alone() -> int:
    """Count the references to a base's object that only a view holds. The number differs between versions of torch."""
    view = torch.empty(2, device="cpu")[:1]
    base = view._base
    return sys.getrefcount(base)
