"""Keys and random bits: a counter-based generator in int64 arithmetic.

Element i of a draw is SplitMix64's finalizer, a bijection that mixes all 64 bits, applied to the key and the counter
i. There is no state to advance: any part of the work can run again, or elsewhere, and draws the same numbers.
It consists of plain operations, so bits are the same in eager code, under torch.func, in a traced graph, and on every
device. torch 2.13 has its own stateless Philox, torch.func._random, but it is private and runs on CUDA only.

References:
    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fzero._arguments import check_int, is_int
from fzero._format import format_tensor
from fzero._tracebacks import api_boundary

__all__ = ["bits", "bits_at", "check_key", "fold_in", "key", "mix_bits", "split"]


def _to_int64(x: int) -> int:
    """Return the int64 with the lowest 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63


# SplitMix64's constants: 2^64 divided by the golden ratio, and its finalizer's two factors.
_GOLDEN = _to_int64(0x9E3779B97F4A7C15)
_FACTORS = _to_int64(0xBF58476D1CE4E5B9), _to_int64(0x94D049BB133111EB)
# Digits of pi, which make the uses of a key independent: to fold in a number, to split it, and to draw from it.
_FOLD, _SPLIT, _DRAW = _to_int64(0x243F6A8885A308D3), _to_int64(0x13198A2E03707344), _to_int64(0xA4093822299F31D0)


def _shift_right(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shift to the right and fill with zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _mix_number(x: torch.Tensor, number: int | torch.Tensor, second: torch.Tensor | int = 0) -> torch.Tensor:
    """Mix all bits of `x` and a number; `second` is added half-way.

    SplitMix64 adds x and number * GOLDEN. But the number may be the counter of a compiled loop, and C++ assumes that
    its multiples do not overflow. gcc then concludes that the loop never ends (seen with Inductor). So ^ comes first.
    """
    z = (x ^ number) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _FACTORS[0]
    z = z if isinstance(second, int) else z + second
    z = (z ^ _shift_right(z, 27)) * _FACTORS[1]
    return z ^ _shift_right(z, 31)


def check_key(key: Any) -> None:
    """Check that the argument is a key.

    Raises:
        TypeError: if `key` is not an int64 tensor of shape [].
    """
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int64 or key.ndim:
        text = format_tensor(key.dtype, key.shape) if isinstance(key, torch.Tensor) else repr(key)
        raise TypeError(f"key is {text}: expected an int64 tensor of shape [], as fzero.random.key(seed) makes it")


@api_boundary
def key(seed: int) -> torch.Tensor:
    """Make a key from a seed.

    Args:
        seed: an int, of which the lowest 64 bits count. Keys of neighbouring seeds have nothing in common.

    Returns:
        An int64 tensor of shape []. A step takes it as an argument, and a checkpoint can hold it.

    Raises:
        TypeError: if `seed` is not an int.

    Example:
        >>> from fzero import random
        >>> random.uniform(random.key(0), (3,))
        tensor([0.6317, 0.1810, 0.4268])
    """
    if not is_int(seed):
        raise TypeError(f"seed={seed!r}: expected an int; for a key of a key see fzero.random.fold_in")
    return _mix_number(torch.tensor(_DRAW, device="cpu"), _to_int64(seed))


@api_boundary
def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """Make a new key from a key and a number, such as the number of the step, the layer or the rank.

    Args:
        key: a key.
        data: an int, or an integer tensor of shape [].

    Returns:
        The new key, which differs for each `data`.

    Raises:
        TypeError: if `key` is not a key, or `data` is not an integer.

    Example:
        >>> from fzero import random
        >>> k = random.key(0)
        >>> bool(random.fold_in(k, 1) == random.fold_in(k, 2))
        False
    """
    check_key(key)
    if isinstance(data, torch.Tensor):
        is_integer = not (data.ndim or data.is_floating_point() or data.is_complex() or data.dtype == torch.bool)
    else:
        is_integer = is_int(data)
    if not is_integer:
        text = format_tensor(data.dtype, data.shape) if isinstance(data, torch.Tensor) else repr(data)
        raise TypeError(f"data is {text}: expected an int, or an integer tensor of shape []")
    return _mix_number(
        key + _FOLD, data.to(key.device, torch.int64) if isinstance(data, torch.Tensor) else _to_int64(data)
    )


@api_boundary
def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """Make several keys from one.

    Args:
        key: a key.
        num: the number of new keys.

    Returns:
        The keys, int64 `[num]`; `a, b = split(key)` unpacks them, and `torch.vmap` maps over them.

    Raises:
        TypeError: if `key` is not a key.
        ValueError: if `num` is not an int, or is below 0.

    Example:
        >>> from fzero import random
        >>> weights, noise = random.split(random.key(0))
        >>> torch.vmap(lambda k: random.normal(k, ()))(random.split(noise, 3)).shape
        torch.Size([3])
    """
    check_key(key)
    check_int("num", num, 0, "a number of keys")
    return _mix_number(key + _SPLIT, torch.arange(num, device=key.device))


def bits(key: torch.Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
    """Draw 64 random bits per element: an int64 tensor of this shape, by default on the key's device."""
    if isinstance(shape, torch.Tensor) and not isinstance(key, torch.Tensor):
        raise TypeError(f"key is {key!r}, and shape is a tensor: the key comes first, fzero.random.normal(key, shape)")
    check_key(key)
    if isinstance(shape, int):
        raise TypeError(f"shape={shape}: expected a sequence of sizes, such as ({shape},)")
    key = key if device is None else key.to(device)
    return bits_at(key, torch.arange(math.prod(shape), device=key.device).view(tuple(shape)))


def bits_at(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Draw the 64 random bits of some elements: int64, those of `bits` at these places of its flat result."""
    # The key enters twice: else two keys that differ in few bits would give the same numbers in another order.
    return _mix_number(key, counter, second=_mix_number(key + _DRAW, 0))


def mix_bits(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Mix the bits of two int64 tensors: random bits, int64, that depend on nothing else."""
    return _mix_number(x, place)
