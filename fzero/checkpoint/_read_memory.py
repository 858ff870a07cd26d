"""Memory to read into: each leaf gets its own.

If two leaves were read into the same memory, both would hold the later one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import in_buffers, storage_id
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, is_box, make_box, spaces

__all__ = ["materialize"]


def _overlapping_indices(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of tensors that share an element with an earlier tensor, or whose own elements overlap."""
    spans = [(storage_id(x), *_byte_span(x), i) for i, x in enumerate(tensors) if x.numel() and not x.is_meta]
    indices = {i for *_, i in spans if _is_expanded(tensors[i])}
    active: list[tuple[int, int, int, int]] = []
    for span in sorted(spans):
        storage, start, _, i = span
        active = [s for s in active if s[0] == storage and s[2] > start]
        indices.update(max(i, j) for *_, j in active if _share_bytes(tensors[i], tensors[j]))
        active.append(span)
    return indices


def _byte_span(x: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's first byte in its storage, and the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset()) * x.element_size()
    return start, start + (last + 1) * x.element_size()


def _is_expanded(x: torch.Tensor) -> bool:
    """Return whether a tensor is expanded, so that several elements share memory."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _share_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping spans share a byte. Two columns of a matrix share none."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    (a, stop), (b, end) = _byte_span(x), _byte_span(y)
    shared_start = min(a, b)
    mask = torch.zeros(max(stop, end) - shared_start, dtype=torch.bool, device="cpu")
    _bytes_in(mask, x, a - shared_start).fill_(True)
    return bool(_bytes_in(mask, y, b - shared_start).any())


def _bytes_in(buffer: torch.Tensor, x: torch.Tensor, offset: int) -> torch.Tensor:
    """View the bytes of a buffer that a tensor's elements occupy."""
    size = x.element_size()
    return buffer.as_strided((*x.shape, size), (*[stride * size for stride in x.stride()], 1), offset)


def materialize(like: Any, mesh: Mesh | None) -> Any:
    """Allocate memory on the mesh's device for each tensor on the meta device. Shards begin as zeros, for the padding.

    A leaf that shares memory with another leaf gets new memory too, such as averages that start as the parameters.
    Leaves that lie side by side in one buffer lie so again. All other values are kept.
    """
    device = torch.device("cpu") if mesh is None else mesh.device
    entries, structure = tree.flatten(like, is_box)
    plain = {id(x): x for x in entries if isinstance(x, torch.Tensor)}  # a tied tensor is one leaf
    boxed = [x for entry in entries for x in _box_tensors(entry)]  # tensors in boxes are separate leaves, never tied
    shared_indices = _overlapping_indices([*plain.values(), *boxed])
    meta = [key for key, x in plain.items() if x.is_meta]
    buffers = in_buffers([plain[k] for k in meta], lambda x, shape, _: torch.empty(shape, dtype=x.dtype, device=device))
    fresh = {key: _zeros_on_device(x, device) for i, (key, x) in enumerate(plain.items()) if i in shared_indices}
    plain |= {**fresh, **dict(zip(meta, buffers, strict=True))}
    devices = [device_name for entry in entries for device_name in _tensor_devices(entry, device)]
    usable = [not x.is_meta and i not in shared_indices for i, x in enumerate(boxed, len(plain))]
    boxed_tensors = iter(
        [x if is_usable else _zeros_on_device(x, to) for x, to, is_usable in zip(boxed, devices, usable, strict=True)]
    )
    for i, x in enumerate(entries):
        if isinstance(x, torch.Tensor):
            entries[i] = plain[id(x)]
        elif isinstance(x, Shard):
            pieces = [next(boxed_tensors) for _ in x.pieces]
            entries[i] = (
                x if all(a is b for a, b in zip(pieces, x.pieces, strict=True)) else make_box(x.spec_id, pieces)
            )
        elif isinstance(x, PerRank):
            leaves, value_structure = tree.flatten(x.value)
            entries[i] = PerRank(
                tree.unflatten(value_structure, [next(boxed_tensors) if _is_tensor(y) else y for y in leaves]), x.axes
            )
    return tree.unflatten(structure, entries)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _box_tensors(entry: Any) -> list[torch.Tensor]:
    """List the tensors in a box."""
    if isinstance(entry, Shard):
        return list(entry.pieces)
    return tree.tensors(entry.value) if isinstance(entry, PerRank) else []


def _tensor_devices(entry: Any, device: torch.device) -> list[torch.device]:
    """List the device of each tensor in a box. A shard's host pieces belong in host memory."""
    if isinstance(entry, Shard):
        return [torch.device("cpu") if space == "host" else device for space in spaces(entry)]
    return [device] * len(_box_tensors(entry))


def _zeros_on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros with the shape and dtype of a tensor, on its device; on `device` if it is a meta tensor."""
    return torch.zeros(x.shape, dtype=x.dtype, device=device if x.is_meta else x.device)
