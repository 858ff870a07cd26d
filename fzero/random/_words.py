"""Random words of 32 bits by key and place: a counter-based generator in int32 arithmetic.

A CPU multiplies 32-bit numbers in vectors of twice as many elements, in a third of the operations of 64-bit ones.
Places have two words of 32 bits from the 64 bits of a key. One enters before and one after the first multiplication,
so that two keys do not give one set of words in two orders.

References:
    Wellons: Prospecting for hash functions, https://nullprogram.com/blog/2018/07/31 (triple32).
"""

import torch

from fzero.random._keys import bits_at

__all__ = ["key_words", "words_at"]


def _to_int32(x: int) -> int:
    """Return the int32 with the lowest 32 bits of `x`."""
    return (x + 2**31) % 2**32 - 2**31


_FACTORS = _to_int32(0xED5AD4BB), _to_int32(0xAC4C1B51), _to_int32(0x31848BAB)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros."""
    return (z >> bits) & ((1 << (32 - bits)) - 1)


def key_words(key: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two words for each stream of a key, of these int64 numbers: int32, of the shape of `numbers`."""
    bits = bits_at(key, numbers)
    return bits.to(torch.int32), (bits >> 32).to(torch.int32)


def words_at(first: torch.Tensor, second: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Draw 32 random bits for each place of a stream.

    Args:
        first: a word of the stream, int32.
        second: its other word, int32.
        places: integers, which broadcast with both words. Of those beyond 32 bits the higher bits are mixed in.

    Returns:
        An int32 tensor.
    """
    if places.dtype == torch.int64:
        places = ((places ^ (places >> 32) * _FACTORS[1]) & 0xFFFFFFFF).to(torch.int32)
    z = places ^ first
    z = (z ^ _shift_right(z, 17)) * _FACTORS[0]
    z = z ^ second
    z = (z ^ _shift_right(z, 11)) * _FACTORS[1]
    z = (z ^ _shift_right(z, 15)) * _FACTORS[2]
    return z ^ _shift_right(z, 14)
