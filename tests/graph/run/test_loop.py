"""What the first turn of a loop finds where later ones find what the turn before left on its way."""

import pytest
import torch

from fzero.collectives import gloo
from fzero.graph.loop import _loop_functions as _loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_arrives_first_changes_no_sum_not_even_the_sign_of_a_zero(dtype):
    total = torch.tensor([0.0, -0.0, 1.5, -2.0]).to(dtype)
    found = gloo.wait(_loop._pending_zeros(total.shape, dtype, torch.device("cpu")))
    after = total + found
    assert found.dtype == after.dtype == dtype and torch.equal(after.view(torch.uint8), total.view(torch.uint8))


def test_a_loop_takes_no_memory_before_it_is_waited_for():
    arriving = _loop._pending_zeros(torch.Size([1 << 40]), torch.float32, torch.device("cpu"))
    assert not arriving.works
