"""torch's float8 product computes `(a * scale_a) @ (b * scale_b).mT`, on this torch and this processor."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch import scaled_mm
from fzero.graph.ir import flops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def integers(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Codes whose products have exact sums in float32, in any order."""
    return torch.randint(-4, 5, (m, k), generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("fast", [False, True])
def test_the_product_is_that_of_the_decoded_numbers_to_the_last_bit(dtype, rowwise, kinds, fast):
    a, b = integers(5, 32, kinds[0]), integers(48, 32, kinds[1])
    scale_a = 2.0 ** torch.arange(-2, 3).view(5, 1) if rowwise else torch.tensor(0.5)
    scale_b = 2.0 ** (torch.arange(48) % 3).view(48, 1) if rowwise else torch.tensor(4.0)
    y = scaled_mm(a, b, scale_a, scale_b, dtype, fast)
    assert y.dtype == dtype
    assert torch.equal(y, ((a.float() * scale_a) @ (b.float() * scale_b).mT).to(dtype))


def test_the_flops_of_a_scaled_product_are_those_of_a_product():
    args: Any = integers(5, 32, E4M3), integers(48, 32, E4M3), torch.tensor(1.0), torch.tensor(1.0)
    graph = make_fx(lambda a, b, s, t: scaled_mm(a, b, s, t, torch.float32, False), tracing_mode="fake")(*args).graph
    assert [flops(n) for n in graph.nodes if flops(n)] == [2 * 5 * 32 * 48]
