"""Views of bits under vmap, and products by rows, as torch 2.11 needs them."""

import sys

import pytest
import torch

from fzero import _torch
from fzero._torch import bits

PAIRS = [(torch.float32, torch.int32), (torch.int8, torch.uint8), (torch.float8_e4m3fn, torch.uint8)]


@pytest.mark.parametrize("has_rule", [False, torch.__version__ >= "2.13"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bits_are_viewed_under_vmap_as_in_a_loop(source, target, has_rule, monkeypatch):
    """The batch dimension need not be the first, and the vmap may lie within another."""
    monkeypatch.setattr(bits, "_HAS_RULE", has_rule)
    x = (torch.randn(3, 4, 5) * 9).to(source)
    expected = x.view(target)
    for dim in range(3):
        actual = torch.vmap(lambda row: _torch.view_bits(row, target), in_dims=dim, out_dims=dim)(x)
        assert torch.equal(actual, expected)
    twice = torch.vmap(torch.vmap(lambda row: _torch.view_bits(row, target), in_dims=1), in_dims=0)(x)
    assert torch.equal(twice, expected.mT)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 has no product of float8 by rows on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_by_rows_without_torchs_own_has_its_numbers(dtype, monkeypatch):
    a, b = [torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = torch.rand(16, 1) + 0.5, torch.rand(16, 1) + 0.5
    expected = _torch.scaled_mm(a, b, *scales, dtype=dtype, fast=False)
    monkeypatch.setattr(sys.modules["fzero._torch.scaled_mm"], "_HAS_NO_ROWS", True)
    actual = _torch.scaled_mm(a, b, *scales, dtype=dtype, fast=False)
    torch.testing.assert_close(actual, expected)
