"""Eight-bit numbers with a dynamic code: a byte for each element, and a scale for each block of 256 elements.

The code is bitsandbytes' (arXiv:2110.02861): the code's values are dense near 0 and near 1, so that a block may hold
moments of six orders of magnitude. A moment is the scale of its block times the value of its byte.
"""

import functools

import torch

__all__ = ["ZERO", "decode", "dynamic_values", "encode"]

ZERO = {True: 127, False: 0}  # the byte of the value 0, of the signed and of the unsigned code


@functools.cache
def dynamic_values(signed: bool) -> tuple[float, ...]:
    """Return the 256 values of the dynamic code, in ascending order: each a float32.

    Decade i of 7 lies between 10^(i - 7) and 10^(i - 6). It is divided into 2^i equal parts, or 2^(i + 1) for the
    unsigned code, whose middles are values. The signed code has their negatives too. The other values are 0 and 1.

    Args:
        signed: whether the code has negative values, for first moments. Second moments have none.

    Example:
        >>> values = dynamic_values(signed=True)
        >>> len(values), round(values[0], 4), values[127], values[255]
        (256, -0.993, 0.0, 1.0)
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += [*middles, *([-x for x in middles] if signed else [])]
    return tuple(torch.tensor(sorted(values), dtype=torch.float32, device="cpu").tolist())


@functools.cache
def _midpoints(signed: bool) -> tuple[float, ...]:
    """Return the 255 numbers halfway between neighbouring values, in float32."""
    values = torch.tensor(dynamic_values(signed), dtype=torch.float32, device="cpu")
    return tuple(((values[1:] + values[:-1]) / 2).tolist())


def encode(x: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the byte of each element: that of the value nearest to `x / scales`.

    Args:
        x: the elements.
        scales: the scale of each element, which broadcasts to `x`. An element with the scale 0 becomes 0.
        signed: whether elements may be negative.

    Returns:
        A uint8 tensor of the shape of `x`.

    Example:
        >>> codes = encode(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor(2.0), signed=True)
        >>> codes, decode(codes, torch.tensor(2.0), signed=True)
        (tensor([ 29, 209, 255], dtype=torch.uint8), tensor([-1.0047,  0.5078,  2.0000]))
    """
    fractions = x / torch.where(scales == 0, torch.ones_like(scales), scales)
    midpoints = torch.tensor(_midpoints(signed), dtype=x.dtype, device=x.device)
    return torch.bucketize(fractions, midpoints, out_int32=True).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Return the elements that `encode` encoded, rounded: a tensor of the dtype of `scales`."""
    values = torch.tensor(dynamic_values(signed), dtype=scales.dtype, device=scales.device)
    return values[codes.to(torch.int32)] * scales
