"""Part of a tensor's elements, in their order, without a copy of the rest: whatever its strides are."""

import torch

__all__ = ["elements", "put_elements"]


def elements(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements from `start` to before `stop` of a tensor, in row-major order: `[stop - start]`.

    A view where the tensor is contiguous; else a copy of these elements alone, where `x.reshape(-1)` copies all.
    """
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    parts = [part.reshape(-1) for part in _slices(x, start, stop)]
    return torch.cat(parts) if parts else x.new_empty(0)


def put_elements(x: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy `values` `[n]` into a tensor, from its element `start` on in row-major order, and no copy of the rest."""
    at = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[at : at + part.numel()].view(part.shape))
        at += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: whole rows, and at either end a part of one."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first, last = -(-start // row), stop // row  # whole rows: from the first to before the last
    if first > last:  # all in one row
        return _slices(x[last], start - last * row, stop - last * row)
    before = _slices(x[first - 1], start - (first - 1) * row, row) if first * row > start else []
    after = _slices(x[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([x[first:last]] if first < last else []), *after]
