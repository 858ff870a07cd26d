"""Attention's work is counted for all of the queries' heads, also where keys and values have fewer."""

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch import with_query_heads
from fzero.graph.ir import flops

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(heads: int) -> Graph:
    """The forward and the backward pass of an attention with four query heads and some heads of keys and values."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, sums = ATTENTION(q, k, v)[:2]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, sums, 0.0, False)

    kv = torch.ones(2, heads, 8, 16)
    return make_fx(f, tracing_mode="fake")(torch.ones(2, 4, 8, 16), kv, kv).graph


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_heads_count_as_all_heads(heads):
    results = [flops(n) for n in attention(heads).nodes if flops(n)]
    assert results == [2 * 2 * (2 * 4 * 8 * 8 * 16), 5 * 2 * (2 * 4 * 8 * 8 * 16)]


def test_operations_without_heads_keep_their_arguments():
    args = [torch.ones(2, 3), torch.ones(3, 4)]
    assert with_query_heads(torch.ops.aten.mm, args) is args
