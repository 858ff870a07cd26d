"""Draw random numbers with a key: several distributions, and dropout."""

import math
from collections.abc import Sequence

import torch

from fzero._tracebacks import api_boundary
from fzero.random._keys import bits, bits_at, check_key, fold_in

__all__ = [
    "apply_mask",
    "bernoulli",
    "dropout",
    "exponential",
    "keep_mask_at",
    "normal",
    "permutation",
    "randint",
    "uniform",
]

_Device = torch.device | str | None
# The number of random bits of a number in [0, 1): as many as the dtype's significand holds.
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@api_boundary
def uniform(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: _Device = None
) -> torch.Tensor:
    """Draw numbers uniformly from [0, 1).

    Args:
        key: a key.
        shape: the shape of the result.
        dtype: a floating-point dtype.
        device: the device of the result; by default the key's.

    Returns:
        The numbers: multiples of 2^-24 in float32, 2^-53 in float64, 2^-11 in float16, 2^-8 in bfloat16.

    Raises:
        TypeError: if `key` is not a key, or the dtype is none of these.

    Example:
        >>> from fzero import random
        >>> random.uniform(random.key(1), (2, 2))
        tensor([[0.7829, 0.9880],
                [0.8794, 0.5908]])
    """
    _check_dtype(dtype)
    return _to_fraction(bits(key, shape, device), dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in BITS:
        raise TypeError(f"dtype={dtype}: expected one of {', '.join(map(str, BITS))}")


def _to_fraction(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert each element's highest bits into a number in [0, 1)."""
    n = BITS[dtype]
    return ((x >> (64 - n)) & ((1 << n) - 1)).to(dtype) * 2.0**-n


@api_boundary
def normal(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: _Device = None
) -> torch.Tensor:
    """Draw numbers from the normal distribution of mean 0 and variance 1.

    Args:
        key: a key.
        shape: the shape of the result.
        dtype: a floating-point dtype.
        device: the device of the result; by default the key's.

    Returns:
        The numbers. Numbers in half precision are rounded from float32.

    Raises:
        TypeError: if `key` is not a key, or the dtype is not float64, float32, float16 or bfloat16.

    Example:
        >>> from fzero import random
        >>> random.normal(random.key(1), (3,))
        tensor([-0.6921,  0.0905, -0.3690])

    References:
        Box, Muller: A note on the generation of random normal deviates, 1958.
    """
    _check_dtype(dtype)
    random_bits = bits(key, shape, device)
    if dtype == torch.float64:
        radius = 1 - _to_fraction(random_bits, dtype)  # in (0, 1]
        angle = _to_fraction(bits(fold_in(key, 0), shape, device), dtype)
    else:  # one element's bits give both: 32 bits for the radius, so that it reaches 6.6, and 24 for the angle
        radius = ((random_bits >> 32) & 0xFFFFFFFF).to(torch.float32) * 2.0**-32 + 2.0**-33
        angle = (random_bits & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).to(dtype)


def exponential(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: _Device = None) -> torch.Tensor:
    """Draw numbers from the exponential distribution of mean 1; none is 0, so they can be divisors."""
    _check_dtype(dtype)
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # the middles of the intervals, which lie in (0, 1)
    u = _to_fraction(bits(key, shape, device), wide_dtype) + 2.0 ** -(BITS[wide_dtype] + 1)
    return -torch.log(u.clamp(max=1 - 2.0 ** -BITS[wide_dtype])).to(dtype)


@api_boundary
def bernoulli(
    key: torch.Tensor, p: float | torch.Tensor, shape: Sequence[int] = (), device: _Device = None
) -> torch.Tensor:
    """Draw True with probability `p`, else False.

    Args:
        key: a key.
        p: the probability, or a tensor of one probability per element, which broadcasts to `shape`.
        shape: the shape of the result.
        device: the device of the result; by default the key's.

    Returns:
        A bool tensor of shape `shape`.

    Raises:
        TypeError: if `key` is not a key.
        ValueError: if a number `p` is not a probability; the values of a tensor are not checked.

    Example:
        >>> from fzero import random
        >>> random.bernoulli(random.key(1), 0.6, (4,))
        tensor([False, False, False,  True])
    """
    if not isinstance(p, torch.Tensor) and not 0 <= p <= 1:
        raise ValueError(f"p={p}: a probability is between 0 and 1")
    dtype = p.dtype if isinstance(p, torch.Tensor) and p.dtype == torch.float64 else torch.float32
    return uniform(key, shape, dtype, device) < p


@api_boundary
def randint(key: torch.Tensor, low: int, high: int, shape: Sequence[int], device: _Device = None) -> torch.Tensor:
    """Draw integers uniformly from low to high - 1.

    Args:
        key: a key.
        low: the lowest integer.
        high: one more than the highest integer.
        shape: the shape of the result.
        device: the device of the result; by default the key's.

    Returns:
        An int64 tensor. If `high - low` does not divide 2^63, the lower integers are slightly more likely, by a
        relative difference of about (high - low) / 2^63.

    Raises:
        TypeError: if `key` is not a key.
        ValueError: if no integer lies in the range.

    Example:
        >>> from fzero import random
        >>> random.randint(random.key(1), 0, 10, (5,))
        tensor([9, 2, 6, 8, 1])
    """
    if high <= low:
        raise ValueError(f"there is no integer from low={low} to high={high} - 1: expected low < high")
    return low + (bits(key, shape, device) & (2**63 - 1)) % (high - low)


def permutation(key: torch.Tensor, n: int, device: _Device = None) -> torch.Tensor:
    """Draw a permutation of the integers below n."""
    return torch.argsort(bits(key, (n,), device), stable=True)


@api_boundary
def dropout(key: torch.Tensor, x: torch.Tensor, p: float) -> torch.Tensor:
    """Set each element to 0 with probability `p`, and scale the remaining elements by 1 / (1 - p).

    Args:
        key: a key.
        x: any floating-point tensor.
        p: the probability.

    Returns:
        A tensor like `x`.

    Raises:
        TypeError: if `key` is not a key.
        ValueError: if `p` is not a probability.

    Example:
        >>> from fzero import random
        >>> random.dropout(random.key(0), torch.ones(6), 0.5)
        tensor([0., 2., 2., 0., 0., 0.])
    """
    return apply_mask(x, keep_mask(key, p, x.shape, x.device), p)


def keep_mask(key: torch.Tensor, p: float, shape: Sequence[int], device: _Device) -> torch.Tensor:
    """Draw the mask of the elements that dropout keeps.

    Raises:
        ValueError: if `p` is not a probability.
    """
    return _is_kept(bits(key, shape, device), p)


def keep_mask_at(key: torch.Tensor, p: float, counter: torch.Tensor) -> torch.Tensor:
    """Draw the mask of some elements that dropout keeps, by their places in the flat tensor.

    Raises:
        TypeError: if `key` is not a key.
        ValueError: if `p` is not a probability.
    """
    check_key(key)
    return _is_kept(bits_at(key.to(counter.device), counter), p)


def _is_kept(random_bits: torch.Tensor, p: float) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: a probability of dropout is between 0 and 1")
    # bits are int64, from -2^63 on: to compare them as they are is faster than to convert them to fractions
    return random_bits >= min(round(p * 2**64) - 2**63, 2**63 - 1)


def apply_mask(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Scale the elements that the mask keeps and set the rest to 0; the backward pass saves only the mask."""
    return torch.where(mask, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)
