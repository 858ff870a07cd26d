"""Which tensors share memory: two leaves that are read into one place would both be what came last."""

from collections.abc import Sequence

import torch

from fzero._torch import storage_id

__all__ = ["overlapping"]


def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the numbers of the tensors that share an element with one before, or whose own elements share memory."""
    spans = [(storage_id(x), *_span(x), i) for i, x in enumerate(tensors) if x.numel() and not x.is_meta]
    found = {i for *_, i in spans if _repeats(tensors[i])}
    active: list[tuple[int, int, int, int]] = []
    for span in sorted(spans):
        storage, start, _, i = span
        active = [s for s in active if s[0] == storage and s[2] > start]
        found.update(max(i, j) for *_, j in active if _meet(tensors[i], tensors[j]))
        active.append(span)
    return found


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset()) * x.element_size()
    return start, start + (last + 1) * x.element_size()


def _repeats(x: torch.Tensor) -> bool:
    """Return whether a tensor is expanded: several elements lie in one place."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors, whose spans overlap, have a byte in common: columns of a matrix have none."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    (a, stop), (b, end) = _span(x), _span(y)
    first = min(a, b)
    taken = torch.zeros(max(stop, end) - first, dtype=torch.bool)
    _bytes_in(taken, x, a - first).fill_(True)
    return bool(_bytes_in(taken, y, b - first).any())


def _bytes_in(taken: torch.Tensor, x: torch.Tensor, at: int) -> torch.Tensor:
    """View the places of a tensor's bytes."""
    size = x.element_size()
    return taken.as_strided((*x.shape, size), (*[stride * size for stride in x.stride()], 1), at)
