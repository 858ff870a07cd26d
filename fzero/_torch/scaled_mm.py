"""torch's product of float8 matrices. On a CPU it computes the numbers of a card, but for the order of sums."""

from typing import Any

import torch

__all__ = ["scaled_mm"]

_torch: Any = torch
_HAS_NO_ROWS = torch.__version__ < "2.13"  # on a CPU torch 2.11 multiplies with one scale for a matrix only


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """Return `(a * scale_a) @ (b * scale_b).mT`, summed in float32.

    Args:
        a: `[m, k]`, float8 and contiguous. On a card k must be a multiple of 16.
        b: `[n, k]`, float8 and contiguous. On a card n must be a multiple of 16, too.
        scale_a: float32, 0-d or `[m, 1]`.
        scale_b: float32, 0-d or `[n, 1]`, as `scale_a`.
        dtype: the dtype of the result.
        fast: whether a card may add in fewer than float32's bits, which saves time.
    """
    scale_b = scale_b.view(1, -1) if scale_b.ndim else scale_b
    if _HAS_NO_ROWS and scale_a.ndim and a.device.type == "cpu":
        return ((a.float() @ b.float().t()) * scale_a * scale_b).to(dtype)
    return _torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
