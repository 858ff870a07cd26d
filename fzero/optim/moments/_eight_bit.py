"""Eight-bit numbers with a dynamic code: a byte for each element, and a scale for each block of 256 elements.

The code is bitsandbytes' (arXiv:2110.02861): the code's values are dense near 0 and near 1, so that a block may hold
moments of six orders of magnitude. A moment is the scale of its block times the value of its byte.

Decade i of 7 lies between 10^(i - 7) and 10^(i - 6). It is divided into 2^i equal parts, or 2^(i + 1) for the unsigned
code, whose middles are values. The signed code has their negatives too. The other values are 0 and 1.

So the value is a convex function of the byte, of one straight line for each decade. A compiler gets that arithmetic,
which becomes vector code. Operations that run one by one look up tables, which are computed by the same arithmetic.
"""

import bisect
import functools
import math
import struct
from typing import NamedTuple

import torch

from fzero._torch import is_fused, is_tracing, tensor_on, view_bits

__all__ = ["ZERO", "DynamicCode", "decode", "dynamic_code", "encode"]

ZERO = {True: 127, False: 0}  # the byte of the value 0, of the signed and of the unsigned code


def _round_to_float32(x: float) -> float:
    """Round to float32. The tables are computed in Python, since a trace may ask for them first."""
    return struct.unpack("f", struct.pack("f", x))[0]


_MANTISSA = (1 << 23) - 1  # the bits of a float32's mantissa
_UNIT = _round_to_float32(1e-7)  # the lower end of the first decade


class _DecadeLine(NamedTuple):
    """A straight line from a fraction, a number divided by its block's scale, to the level at which its byte changes.

    The level of byte c is c - 126 for a positive signed number and c + 1 for the unsigned code.
    """

    slope: float
    start: float


def _decade_lines(signed: bool) -> list[_DecadeLine]:
    """Return a line for each decade; the smallest of their values at a fraction is its level.

    A level is an integer plus 0.2 halfway between the last value of a decade and the first of the next, since their
    distances are 1 to 5. The first line goes through the numbers halfway between 0 and the first values instead.
    """
    parts = 1 if signed else 2
    exact = [_DecadeLine(parts / (9 * 5**i) / 1e-7, parts * 2**i * 8 / 9) for i in range(1, 7)]
    first = _DecadeLine(0.9 / 2.75e-7, 0.3) if signed else _DecadeLine(0.8 / 3.875e-7, 2.2 - 0.8 * 1.625 / 3.875)
    return [_DecadeLine(_round_to_float32(slope), _round_to_float32(start)) for slope, start in (first, *exact)]


_EDGE = _round_to_float32(0.2)  # the part of a level by which the first byte of a decade begins later
_LAST = {True: _round_to_float32(1 - 4.5e-1 / 128), False: _round_to_float32(1 - 4.5e-1 / 256)}  # halfway to 1
_LEVELS = {True: 128.0, False: 256.0}  # the level of the value 1


@functools.cache
def _dynamic_values(signed: bool) -> tuple[float, ...]:
    """Return the 256 values of the dynamic code, in ascending order: each a float32.

    Args:
        signed: whether the code has negative values, for first moments. Second moments have none.

    Example:
        >>> values = _dynamic_values(signed=True)
        >>> len(values), round(values[0], 4), values[127], values[255]
        (256, -0.993, 0.0, 1.0)
    """
    places = [abs(byte - 127) + 0.5 if signed else (byte + 1.5) / 2 for byte in range(256)]
    values = [min(_round_to_float32(max(_value_in_units(place), 0.0) * _UNIT), 1.0) for place in places]
    return tuple([-x if signed and byte < 127 else x for byte, x in enumerate(values)])


def _value_in_units(place: float) -> float:
    """Return the value at a place, in units of 1e-7: decade i begins at the place 2^i. Only its sum is rounded."""
    total = 0.0
    for i in range(6, 0, -1):
        total = total * 5 + max(place - 2**i, 0.0)
    return _round_to_float32(36 * total + (9 * place - 8))


def _quantization_level(fraction: float, lines: list[_DecadeLine], signed: bool) -> float:
    """Return the level of a fraction that is not negative, in float32's arithmetic: see `_decade_lines`."""
    if not fraction <= _LAST[signed]:
        return _LEVELS[signed]
    exact = min([_round_to_float32(_round_to_float32(fraction * x.slope) + x.start) for x in lines])
    integer_part = math.floor(exact)
    return math.floor(_round_to_float32(exact - _EDGE)) if integer_part & (integer_part - 1) == 0 else integer_part


@functools.cache
def _midpoints(signed: bool) -> tuple[float, ...]:
    """Return for each byte the largest float32 that is not rounded to a higher one; infinity for the last byte."""
    lines, values = _decade_lines(signed), _dynamic_values(signed)
    zero = ZERO[signed]
    ends = [_last_below((values[byte] + values[byte + 1]) / 2, byte - zero, lines, signed) for byte in range(zero, 255)]
    # the magnitude halfway to a negative value has the lower byte, so the last number of that byte is this magnitude
    negatives = [-_next_float32(x) for x in reversed(ends[:zero])]
    return (*negatives, *ends, math.inf)


def _last_below(start: float, index: int, lines: list[_DecadeLine], signed: bool) -> float:
    """Return the largest float32 whose byte is at most `index` above that of 0, from a number near it."""
    level = index + (0 if signed else 1)
    x = _round_to_float32(start)
    while _quantization_level(x, lines, signed) > level:
        x = _next_float32(x, -1)
    while _quantization_level(_next_float32(x), lines, signed) <= level:
        x = _next_float32(x)
    return x


def _next_float32(x: float, steps: int = 1) -> float:
    """Return the next larger positive float32, or the next smaller one."""
    return struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", x))[0] + steps))[0]


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
    """A code: its tables as tensors on a device, or arithmetic that a compiler fuses.

    Attributes:
        signed: whether it has negative values.
        tables: the tables; None if a compiler fuses the operations.
    """

    signed: bool
    tables: "_Tables | None"


class _Tables(NamedTuple):
    """The tables of a code.

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
    if is_fused():
        return DynamicCode(signed, None)
    return DynamicCode(signed, (_code_tables.__wrapped__ if is_tracing() else _code_tables)(signed, device))


@functools.cache
def _code_tables(signed: bool, device: torch.device) -> _Tables:
    return _Tables(
        tensor_on(_dynamic_values(signed), dtype=torch.float32, device=device),
        tensor_on(_midpoints(signed), dtype=torch.float32, device=device),
        tensor_on(_least_codes(signed), dtype=torch.uint8, device=device),
    )


def encode(x: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    """Return the byte of each element: that of the value nearest to `x / scales`.

    Args:
        x: the elements.
        scales: the scale of each element, which broadcasts to `x`. An element with the scale 0 becomes 0.
        code: the code.

    Returns:
        A uint8 tensor of the shape of `x`.

    Example:
        >>> code = dynamic_code(signed=True, device=torch.device("cpu"))
        >>> codes = encode(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor(2.0), code)
        >>> codes, decode(codes, torch.tensor(2.0), code)
        (tensor([ 35, 201, 255], dtype=torch.uint8), tensor([-1.0016,  0.4953,  2.0000]))
    """
    fractions = (x / torch.where(scales == 0, torch.ones_like(scales), scales)).to(torch.float32)
    if code.tables is None:
        return _compute_bytes(fractions, code.signed)
    flat = fractions.flatten()
    half = (view_bits(flat, torch.int32) >> 16) & 0xFFFF
    least_codes = code.tables.least.index_select(0, half).to(torch.int32)
    return (least_codes + (flat > code.tables.midpoints.index_select(0, least_codes))).to(torch.uint8).view(x.shape)


def decode(codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    """Return the elements that `encode` encoded, rounded: a tensor of the dtype of `scales`."""
    if code.tables is None:
        values = _compute_values(codes, code.signed)
    else:
        values = code.tables.values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    return values.to(scales.dtype) * scales


def _compute_bytes(fractions: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the bytes of fractions without look-ups, as `_quantization_level` defines them."""
    sizes = fractions.abs() if signed else fractions
    first, *rest = [sizes * line.slope + line.start for line in _decade_lines(signed)]
    exact = functools.reduce(torch.minimum, rest, first)
    is_first = (view_bits(exact.floor(), torch.int32) & _MANTISSA) == 0  # a power of two: the first byte of a decade
    level = torch.where(is_first, exact - _EDGE, exact).floor()
    level = torch.where(sizes <= _LAST[signed], level, _LEVELS[signed])
    if not signed:
        return (level - 1).to(torch.uint8)
    return (127 + torch.where(fractions < 0, -level, level)).relu().to(torch.uint8)


def _compute_values(codes: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the values of bytes without look-ups, as `_dynamic_values` defines them."""
    byte = codes.to(torch.float32)
    place = (byte - 127).abs() + 0.5 if signed else (byte + 1.5) * 0.5
    total = (place - 64).relu()
    for i in range(5, 0, -1):
        total = total * 5 + (place - 2**i).relu()
    values = ((36 * total + (9 * place - 8)).relu() * _UNIT).clamp(max=1)
    return torch.where(byte < 127, -values, values) if signed else values
