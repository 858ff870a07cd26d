"""Formats of numbers and tensors in messages and tables."""

from collections.abc import Sequence

import torch

__all__ = ["format_bytes", "format_seconds", "format_tensor"]


def format_bytes(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    if seconds >= 0.1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"


def format_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Format a tensor's dtype and shape: "float32 [2, 3]"."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
