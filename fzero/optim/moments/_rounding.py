"""Stochastic rounding of float32 to bfloat16."""

import torch

from fzero._torch import view_bits

__all__ = ["round_at_random"]


def round_at_random(x: torch.Tensor, random_bits: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, away from zero with probability (lower 16 bits) / 2**16.

    It adds 16 random bits to the lower half, whose sum carries with that probability, and cuts the half off.

    Args:
        x: the values, float32. Infinities become the largest finite values.
        random_bits: int32, of the shape of `x`; the lowest 16 bits count.
    """
    largest = torch.finfo(torch.bfloat16).max
    bits = view_bits(x.clamp(-largest, largest).contiguous(), torch.int32)
    sum_bits = bits + (random_bits & 0xFFFF)
    return view_bits(sum_bits & -0x10000, torch.float32).to(torch.bfloat16)
