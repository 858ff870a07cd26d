"""Keys, and the bits that they stand for: a counter-based generator in int64 arithmetic.

Element i of a draw is SplitMix64's finalizer, a bijection that mixes all 64 bits, of the key and the counter i. No
state is kept, so nothing is advanced: any part of the work can be done again, or elsewhere, and draws the same.
Plain operations, so that it is one thing in eager code, under torch.func, in a traced graph, and on every device.
torch 2.13 has a stateless Philox of its own, torch.func._random, but it is private, and on CUDA only.

References:
    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["bits", "check_key", "fold_in", "key", "split"]


def _signed(x: int) -> int:
    """Return the int64 with the lowest 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63


# Those of SplitMix64: 2^64 divided by the golden ratio, and its finalizer's two factors.
GOLDEN = _signed(0x9E3779B97F4A7C15)
FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
# Digits of pi, which keep the uses of a key apart: it is folded with a number, split, or drawn from.
FOLD, SPLIT, SECOND = _signed(0x243F6A8885A308D3), _signed(0x13198A2E03707344), _signed(0xA4093822299F31D0)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mixed(x: torch.Tensor, number: int | torch.Tensor, second: torch.Tensor | int = 0) -> torch.Tensor:
    """Mix all bits of `x` and a number; `second` is added half-way.

    SplitMix64 adds x and number * GOLDEN. But the number is the counter of a compiled loop, whose multiples C++ takes
    not to overflow. From that gcc concludes that the loop needs no end (seen with Inductor). So ^ is first.
    """
    z = (x ^ number) * GOLDEN
    z = (z ^ _shifted(z, 30)) * FACTORS[0]
    z = z if isinstance(second, int) else z + second
    z = (z ^ _shifted(z, 27)) * FACTORS[1]
    return z ^ _shifted(z, 31)


def check_key(key: Any) -> None:
    """Check that this is a key.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int64 or key.ndim:
        given = f"{key.dtype} {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
        raise TypeError(f"expected a key, an int64 tensor of shape [], and was given {given}: fzero.random.key(seed)")


def key(seed: int) -> torch.Tensor:
    """Make a key of a seed.

    Args:
        seed: an int, of which the lowest 64 bits count; keys of neighbouring seeds have nothing in common.

    Returns:
        An int64 tensor of shape []: a step takes it as an argument, and a checkpoint can hold it.

    Raises:
        TypeError: if `seed` is not an int.

    Example:
        >>> from fzero import random
        >>> random.uniform(random.key(0), (3,))
        tensor([0.6317, 0.1810, 0.4268])
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r}: expected an int")
    return _mixed(torch.tensor(SECOND), _signed(seed))


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """Make another key of a key and a number, such as that of the step, the layer or the rank.

    Args:
        key: a key.
        data: an int, or an integer tensor of shape [].

    Returns:
        The key: another for each `data`.

    Raises:
        TypeError: if `key` is no key, or `data` no integer.

    Example:
        >>> from fzero import random
        >>> k = random.key(0)
        >>> bool(random.fold_in(k, 1) == random.fold_in(k, 2))
        False
    """
    check_key(key)
    if isinstance(data, torch.Tensor):
        whole = not (data.ndim or data.is_floating_point() or data.is_complex() or data.dtype == torch.bool)
    else:
        whole = isinstance(data, int) and not isinstance(data, bool)
    if not whole:
        given = f"{data.dtype} {list(data.shape)}" if isinstance(data, torch.Tensor) else repr(data)
        raise TypeError(f"data is {given}: expected an int, or an integer tensor of shape []")
    return _mixed(key + FOLD, data.to(key.device, torch.int64) if isinstance(data, torch.Tensor) else _signed(data))


def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """Make several keys of one.

    Args:
        key: a key.
        num: how many.

    Returns:
        The keys, int64 `[num]`; `a, b = split(key)` takes them apart, and `torch.vmap` maps over them.

    Raises:
        TypeError: if `key` is no key.

    Example:
        >>> from fzero import random
        >>> weights, noise = random.split(random.key(0))
        >>> torch.vmap(lambda k: random.normal(k, ()))(random.split(noise, 3)).shape
        torch.Size([3])
    """
    check_key(key)
    return _mixed(key + SPLIT, torch.arange(num, device=key.device))


def bits(key: torch.Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
    """Draw 64 random bits an element: int64 of this shape, on the key's device by default."""
    check_key(key)
    key = key if device is None else key.to(device)
    counter = torch.arange(math.prod(shape), device=key.device).view(tuple(shape))
    # The key enters twice: else two keys that differ in few bits had the same numbers in another order.
    return _mixed(key, counter, second=_mixed(key + SECOND, 0))
