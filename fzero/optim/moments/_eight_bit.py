"""Eight-bit numbers with a dynamic code: a byte for each element, and a scale for each block of 256 elements.

The code is bitsandbytes' (arXiv:2110.02861): the code's values are dense near 0 and near 1, so that a block may hold
moments of six orders of magnitude. A moment is the scale of its block times the value of its byte.
"""

import bisect
import functools
import itertools
import math
import struct
from typing import NamedTuple

import torch

from fzero._torch import is_tracing, tensor_on, view_bits

__all__ = ["ZERO", "DynamicCode", "decode", "dynamic_code", "encode"]

ZERO = {True: 127, False: 0}  # the byte of the value 0, of the signed and of the unsigned code


@functools.cache
def _dynamic_values(signed: bool) -> tuple[float, ...]:
    """Return the 256 values of the dynamic code, in ascending order: each a float32.

    Decade i of 7 lies between 10^(i - 7) and 10^(i - 6). It is divided into 2^i equal parts, or 2^(i + 1) for the
    unsigned code, whose middles are values. The signed code has their negatives too. The other values are 0 and 1.

    Args:
        signed: whether the code has negative values, for first moments. Second moments have none.

    Example:
        >>> values = _dynamic_values(signed=True)
        >>> len(values), round(values[0], 4), values[127], values[255]
        (256, -0.993, 0.0, 1.0)
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = _bin_edges(parts)
        middles = [_round_to_float32((x + y) / 2) for x, y in itertools.pairwise(edges)]
        scaled = [_round_to_float32(_round_to_float32(10.0 ** (decade - 6)) * x) for x in middles]
        values += [*scaled, *([-x for x in scaled] if signed else [])]
    return tuple(sorted(values))


def _round_to_float32(x: float) -> float:
    """Round to float32. The tables are computed in Python, since a trace may ask for them first."""
    return struct.unpack("f", struct.pack("f", x))[0]


def _bin_edges(parts: int) -> list[float]:
    """Divide [0.1, 1] into equal parts, in the arithmetic of `torch.linspace` in float32: products are not rounded."""
    start, step = _round_to_float32(0.1), _round_to_float32(_round_to_float32(1 - _round_to_float32(0.1)) / parts)
    half = (parts + 1) // 2
    below = [_round_to_float32(start + step * i) for i in range(half)]
    return [*below, *[_round_to_float32(1 - step * (parts - i)) for i in range(half, parts + 1)]]


@functools.cache
def _midpoints(signed: bool) -> tuple[float, ...]:
    """Return the 255 numbers halfway between neighbouring values, in float32; then infinity."""
    pairs = itertools.pairwise(_dynamic_values(signed))
    return (*[_round_to_float32(_round_to_float32(x + y) / 2) for x, y in pairs], math.inf)


@functools.cache
def _least_codes(signed: bool) -> tuple[int, ...]:
    """Return for each first half of a float32's bits the byte of the least float32 that begins with it.

    Between two numbers with one first half lies at most one midpoint. So the byte of a number is this one or the next:
    two look-ups, which take a sixth of the time of a search among 255 midpoints.
    """
    halves = range(2**16)
    bits = [half << 16 | (0xFFFF if half >= 2**15 else 0) for half in halves]  # more bits make a negative number less
    ends = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}I", *bits))
    midpoints = _midpoints(signed)[:-1]
    return tuple([255 if x != x else bisect.bisect_left(midpoints, x) for x in ends])


class DynamicCode(NamedTuple):
    """The tables of a code as tensors on a device.

    Attributes:
        values: the value of each byte, in ascending order, float32 `[256]`.
        midpoints: the numbers halfway between them, and infinity, float32 `[256]`.
        least: for each first half of a float32's bits the byte of the least number that begins with it, `[65536]`.
    """

    values: torch.Tensor
    midpoints: torch.Tensor
    least: torch.Tensor


def dynamic_code(signed: bool, device: torch.device) -> DynamicCode:
    """Return the signed or the unsigned code. A trace makes tensors of its own, which are constants of its graph."""
    return (_code_tables.__wrapped__ if is_tracing() else _code_tables)(signed, device)


@functools.cache
def _code_tables(signed: bool, device: torch.device) -> DynamicCode:
    return DynamicCode(
        tensor_on(_dynamic_values(signed), dtype=torch.float32, device=device),
        tensor_on(_midpoints(signed), dtype=torch.float32, device=device),
        tensor_on(_least_codes(signed), dtype=torch.uint8, device=device),
    )


def encode(x: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    """Return the byte of each element: that of the value nearest to `x / scales`.

    Args:
        x: the elements.
        scales: the scale of each element, which broadcasts to `x`. An element with the scale 0 becomes 0.
        code: the tables of the code.

    Returns:
        A uint8 tensor of the shape of `x`.

    Example:
        >>> code = dynamic_code(signed=True, device=torch.device("cpu"))
        >>> codes = encode(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor(2.0), code)
        >>> codes, decode(codes, torch.tensor(2.0), code)
        (tensor([ 35, 201, 255], dtype=torch.uint8), tensor([-1.0016,  0.4953,  2.0000]))
    """
    fractions = (x / torch.where(scales == 0, torch.ones_like(scales), scales)).to(torch.float32).flatten()
    half = (view_bits(fractions, torch.int32) >> 16) & 0xFFFF
    least = code.least.index_select(0, half).to(torch.int32)
    return (least + (fractions > code.midpoints.index_select(0, least))).to(torch.uint8).view(x.shape)


def decode(codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    """Return the elements that `encode` encoded, rounded: a tensor of the dtype of `scales`."""
    values = code.values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    return values.to(scales.dtype) * scales
