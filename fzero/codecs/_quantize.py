"""Blocks of numbers in fewer bits: one scale for each block, and a code of 4 or 8 bits for each number.

A block of codes is `round(x / scale)`, and `code * scale` gives the numbers back. The scale is the block's largest
magnitude divided by the largest code, so the largest number is exact up to float32's rounding. A scale of float8 is the
next power of two, so that dividing by it rounds nothing.
"""

from typing import NamedTuple

import torch

from fzero._torch import view_bits
from fzero.random import mix_bits

__all__ = ["KINDS", "CodeKind", "block_scales", "codes_to_float32", "largest_magnitudes", "pack", "quantize", "unpack"]


class CodeKind(NamedTuple):
    """A kind of codes.

    Attributes:
        bits: the bits of a code: 4 or 8.
        largest: the largest code; the codes are symmetric, from -largest to largest.
        dtype: the dtype of the codes. The codes of float8 are moved as their bytes, uint8: torch has few operations
            for float8.
    """

    bits: int
    largest: float
    dtype: torch.dtype

    @property
    def is_float(self) -> bool:
        """Whether a code is a floating-point number."""
        return self.dtype.is_floating_point


KINDS = {
    "int8": CodeKind(8, 127.0, torch.int8),
    "int4": CodeKind(4, 7.0, torch.int8),
    "float8_e4m3": CodeKind(8, 448.0, torch.float8_e4m3fn),
    "float8_e5m2": CodeKind(8, 57344.0, torch.float8_e5m2),
}

_TINY = torch.finfo(torch.float32).tiny  # the smallest scale: below it a quotient would overflow
_FRACTION_BITS = (1 << 23) - 1  # of float32
_FRACTION_COUNT = 1 << 24  # the number of distinct fractions of a random rounding: as many as float32 resolves below 1


def largest_magnitudes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each block `[.., b]`: float32 `[..]`. It is inf if a number is not finite.

    A reduction of maxima over ranks may lose a nan, but never an inf.
    """
    return torch.nan_to_num(blocks.abs().amax(-1).to(torch.float32), nan=torch.inf, posinf=torch.inf)


def block_scales(kind: CodeKind, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block, from its largest magnitude."""
    scales = (magnitudes / kind.largest).clamp(min=_TINY)
    return _power_of_two(scales) if kind.is_float else scales


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the next power of two of positive normal float32 numbers; infinity stays."""
    return view_bits((view_bits(x, torch.int32) + _FRACTION_BITS) & ~_FRACTION_BITS, torch.float32)


def quantize(kind: CodeKind, blocks: torch.Tensor, scales: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """Return the codes of blocks `[.., n, b]` with scales `[.., n]`: int8, or the bytes of float8.

    Args:
        kind: the kind of codes.
        blocks: the numbers.
        scales: the scales; if one is inf, the codes of its block are 0.
        first: None to round to the nearest code. An int to round up or down at random, so that the mean of the codes
            is right: the number of the first block within the unit. The draw depends on the number's place and bits.
    """
    x = blocks.to(torch.float32) / scales.unsqueeze(-1)
    x = torch.where(torch.isfinite(x), x, 0.0)  # in a block that is not finite; its scale makes every result nan
    if first is not None:
        x = torch.floor(x + _draw_fractions(blocks, first))
    elif not kind.is_float:
        x = torch.round(x)
    codes = x.clamp(-kind.largest, kind.largest).to(kind.dtype)
    return view_bits(codes, torch.uint8) if kind.is_float else codes


def codes_to_float32(kind: CodeKind, codes: torch.Tensor) -> torch.Tensor:
    """Return codes as float32, without their scales."""
    return (view_bits(codes, kind.dtype) if kind.is_float else codes).to(torch.float32)


def _draw_fractions(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Draw a number in [0, 1) for each number of blocks, from its place and its bits. It needs no key and no state."""
    n, b = blocks.shape[-2:]
    places = torch.arange(first * b, (first + n) * b, device=blocks.device).view(n, b)
    values = view_bits(blocks.to(torch.float32).contiguous(), torch.int32).to(torch.int64)
    random = mix_bits(values & 0xFFFFFFFF, places << 32)
    return ((random >> 32) & (_FRACTION_COUNT - 1)).to(torch.float32) / _FRACTION_COUNT


def pack(kind: CodeKind, codes: torch.Tensor) -> torch.Tensor:
    """Return codes `[.., k]` as uint8 `[.., bytes]`: two codes of 4 bits in a byte, the first one in the low bits."""
    if kind.bits == 8:
        return view_bits(codes, torch.uint8)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low, high = (view_bits(codes, torch.uint8) & 0xF).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack(kind: CodeKind, payload: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` codes of a payload: int8, or the bytes of float8."""
    if kind.bits == 8:
        return payload if kind.is_float else view_bits(payload, torch.int8)
    codes = torch.stack([payload & 0xF, payload >> 4], -1).flatten(-2)[..., :count]
    return ((codes ^ 8).to(torch.int8)) - 8  # the sign bit of four bits
