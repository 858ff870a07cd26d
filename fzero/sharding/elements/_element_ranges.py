"""Ranges of a tensor's elements in row-major order, for any strides, without a copy of the other elements."""

import torch

__all__ = ["put_elements", "slice_elements"]


def slice_elements(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the elements `[start, stop)` of a tensor, in row-major order: a tensor `[stop - start]`.

    The result is a view if the tensor is contiguous. Otherwise it copies these elements alone; `x.reshape(-1)` would
    copy all.
    """
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    parts = [part.reshape(-1) for part in _slices(x, start, stop)]
    return torch.cat(parts) if parts else x.new_empty(0)


def put_elements(x: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Copy `values` `[n]` into a tensor, from its element `start` on in row-major order, without any other copy."""
    first = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[first : first + part.numel()].view(part.shape))
        first += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: full rows, and parts of rows at both ends."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first, last = -(-start // row), stop // row  # the full rows are [first, last)
    if first > last:  # all in one row
        return _slices(x[last], start - last * row, stop - last * row)
    before = _slices(x[first - 1], start - (first - 1) * row, row) if first * row > start else []
    after = _slices(x[last], 0, stop - last * row) if last * row < stop else []
    return [*before, *([x[first:last]] if first < last else []), *after]
