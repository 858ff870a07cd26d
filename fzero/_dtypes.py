"""Dtypes of sums: in half precision they lose small terms, and squares overflow."""

import torch

__all__ = ["at_least_float32", "sum_dtype"]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of a dtype are summed: float32, or a wider dtype itself.

    Example:
        >>> sum_dtype(torch.bfloat16), sum_dtype(torch.int64), sum_dtype(torch.float64)
        (torch.float32, torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Widen a half-precision tensor to float32: in half precision squares overflow, and an eps of 1e-8 is 0."""
    return x.to(sum_dtype(x.dtype))
