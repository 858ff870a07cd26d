"""The first iteration of a loop finds zeros where later ones find a collective in flight from the iteration before."""

import pytest
import torch

from fzero.collectives import gloo
from fzero.graph.loop import _loop_function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_the_first_share_of_a_sum_keeps_the_sign_of_a_zero(dtype):
    total = torch.tensor([0.0, -0.0, 1.5, -2.0]).to(dtype)
    result = gloo.wait(_loop_function._pending_zeros(total.shape, dtype, torch.device("cpu")))
    after = total + result
    assert result.dtype == after.dtype == dtype and torch.equal(after.view(torch.uint8), total.view(torch.uint8))


def test_the_zeros_that_a_loop_starts_with_take_no_memory():
    arriving = _loop_function._pending_zeros(torch.Size([1 << 40]), torch.float32, torch.device("cpu"))
    assert not arriving.requests
