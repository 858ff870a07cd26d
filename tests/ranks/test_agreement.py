"""The checksum by which ranks compare their tensors: what changes it, what does not, and what it costs."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.ranks import _agreement
from fzero.ranks._agreement import checksum
from tests.helpers import cases, examples
from tests.memory import peak_bytes

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]


small_rows = patch.object(_agreement, "_BLOCK_WORDS", 4 * 7)


def draw_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, nans among them; a bool has two."""
    g = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=g, dtype=torch.uint8)
    return data.view(dtype).view(shape)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
seeds = st.integers(0, 2**31)


@small_rows
@examples(30, 60)
@given(shapes, st.sampled_from(DTYPES), seeds, st.data())
def test_a_checksum_does_not_depend_on_strides_and_offsets(shape, dtype, seed, data):
    """Whatever view a tensor is, it has the checksum of a copy."""
    x = draw_bits(shape, dtype, seed)
    expected = checksum(x.clone())
    order = data.draw(st.permutations(range(x.ndim)))
    back = [order.index(i) for i in range(x.ndim)]
    permuted = x.permute(order).contiguous().permute(back)
    wide = torch.zeros(*shape, 3, dtype=dtype)
    wide[..., 1] = x
    shifted = torch.zeros(x.numel() + 3, dtype=dtype)
    shifted[3:] = x.flatten()
    for same in (x, permuted, wide[..., 1], shifted[3:].view(shape), torch.nn.Parameter(x, requires_grad=False)):
        assert checksum(same) == expected


@small_rows
def test_lazily_conjugated_or_negated_and_expanded_tensors_are_read_as_their_values():
    z = torch.randn(40, 3, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, z.T.conj(), torch.ones(5, 1).expand(5, 60)):
        assert checksum(lazy) == checksum(
            lazy.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        )


@small_rows
@examples(30, 60)
@given(shapes.filter(lambda s: math.prod(s) > 1), st.sampled_from(DTYPES), seeds, st.data())
def test_a_checksum_tells_a_flipped_bit_and_two_swapped_ones(shape, dtype, seed, data):
    """Of one element any bit, the sign among them; of two elements their order, however far they are apart."""
    x = draw_bits(shape, dtype, seed).contiguous()
    flat = x.view(-1)
    i, j = data.draw(st.lists(st.integers(0, x.numel() - 1), min_size=2, max_size=2, unique=True))
    flipped = x.clone()
    bits = flipped.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, len(bits) - 1))
    bits[at] = bits[at] ^ (1 if dtype == torch.bool else 2 ** data.draw(st.integers(0, 7)))
    assert checksum(flipped) != checksum(x)
    swapped = x.clone()
    swapped.view(-1)[[i, j]] = flat[[j, i]]
    same = torch.equal(swapped.view(-1).view(torch.uint8), flat.view(torch.uint8))
    # words of two rows may lie one over the other, and there a sign that moves from row to row is lost
    over = (i * dtype.itemsize - j * dtype.itemsize) // 4 % _agreement._BLOCK_WORDS == 0
    assert same or over or checksum(swapped) != checksum(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (2048, 256), (512, 1024)], ids=str)
def test_a_checksum_tells_regular_differences(shape, dtype):
    """Ranks that took another sign for a column (as a qr may), a transpose, or the rows in another order."""
    x = torch.randn(shape).to(dtype)
    columns, rows = x.clone(), x.clone()
    columns[:, 3] *= -1
    rows[::2] *= -1
    sums = {checksum(y).item() for y in (x, -x, columns, rows, x.flip(0), x.roll(1, 0), x.roll(1, 1), x.T, x.T.conj())}
    assert len(sums) == 8


@small_rows
def test_a_checksum_tells_swapped_rows():
    """The same words lie over each other then."""
    x = torch.randn(5, _agreement._BLOCK_WORDS)
    sums = {checksum(y).item() for y in (x, x.flip(0), x.roll(1, 0), x[[1, 0, 2, 3, 4]], x[[0, 3, 2, 1, 4]])}
    assert len(sums) == 5


def test_a_checksum_tells_nans_by_their_bits():
    x = torch.full((1000,), math.nan)
    assert checksum(x) == checksum(x.clone())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128)
WAYS = ("whole", "transposed", "expanded", "shifted")


@pytest.mark.parametrize("dtype,how", cases(zip(DTYPES, WAYS, strict=True), itertools.product(DTYPES, WAYS)), ids=str)
def test_a_checksum_takes_a_few_rows_of_memory(how, dtype):
    """Of 32 MiB a few rows of a quarter of a MiB."""
    n = 2**25 // dtype.itemsize
    x = torch.zeros(n + 1, dtype=dtype)
    views = {
        "whole": lambda: x[:n],
        "shifted": lambda: x[1:],
        "transposed": lambda: x[:n].view(1024, -1).T,
        "expanded": lambda: x[:64].view(1, -1).expand(n // 64, 64),
    }
    checksum(x[:9])  # warm
    assert peak_bytes(lambda: checksum(views[how]())) < 2.5 * 2**20
