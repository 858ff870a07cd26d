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
    piece_start = 0
    for part in _slices(x, start, start + values.numel()):
        part.copy_(values[piece_start : piece_start + part.numel()].view(part.shape))
        piece_start += part.numel()


def _slices(x: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """List views of a tensor that hold these elements: full rows, and parts of rows at both ends."""
    if start >= stop:
        return []
    if x.ndim < 2:
        return [x[start:stop] if x.ndim else x]
    row = x[0].numel()
    first_row, last_row = -(-start // row), stop // row  # the full rows are [first, last)
    if first_row > last_row:  # all in one row
        return _slices(x[last_row], start - last_row * row, stop - last_row * row)
    before = _slices(x[first_row - 1], start - (first_row - 1) * row, row) if first_row * row > start else []
    after = _slices(x[last_row], 0, stop - last_row * row) if last_row * row < stop else []
    return [*before, *([x[first_row:last_row]] if first_row < last_row else []), *after]
