"""What kernels take for themselves, by the allocator's events."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.graph.ir import COMPILED, nbytes, node_stand_ins
from fzero.graph.planning.memory._workspaces import workspace_bytes
from tests.memory import peak_bytes

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NORM, WIDE = torch.linalg.vector_norm, torch.randn(128, 128)
KERNELS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "sum as float32": (BF16, lambda x: x.sum(0, dtype=F32)),
    "sum": (BF16, lambda x: x.sum(0)),
    "sum of ints": (torch.int32, lambda x: x.sum()),
    "sum of float32": (F32, lambda x: x.sum()),
    "sum as float64": (F32, lambda x: x.sum(dtype=F64)),
    "mean": (BF16, lambda x: x.mean(-1)),
    "mean as float32": (torch.float16, lambda x: x.mean(dtype=F32)),
    "mean of float32": (F32, lambda x: x.mean()),
    "norm": (BF16, NORM),
    "norm as float32": (BF16, lambda x: NORM(x, dtype=F32)),
    "norms as float64": (F32, lambda x: NORM(x, 2, 0, dtype=F64)),
    "product as float32": (BF16, lambda x: x.prod(dtype=F32)),
    "running sum of bools": (torch.bool, lambda x: x.cumsum(0)),
    "a sum of two dtypes": (BF16, lambda x: x + WIDE),
    "a difference of two dtypes, of a row": (BF16, lambda x: WIDE - x[0]),
    "a product of halves and a number of float32": (BF16, lambda x: x * WIDE[0, 0]),
    "a comparison": (BF16, lambda x: x < WIDE),
    "a product": (BF16, lambda x: x * x),
    "a convolution": (F32, lambda x: torch.conv2d(x.view(4, 16, 16, 16), x.view(-1)[:2304].view(16, 16, 3, 3))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_planned_workspace_is_the_one_that_the_allocator_holds(name):
    dtype, kernel = KERNELS[name]
    x = torch.randn(128, 128).to(dtype)
    nodes = [n for n in make_fx(kernel)(x).graph.nodes if n.op == "call_function"]
    kernel(x)
    outputs = []
    measured = peak_bytes(lambda: outputs.append(kernel(x))) - nbytes(*node_stand_ins(nodes[-1]))
    assert abs(measured - sum(map(workspace_bytes, nodes))) < 1024, measured


def test_compiled_kernels_need_no_workspace():
    (node,) = [n for n in make_fx(lambda x: x + WIDE)(WIDE.to(BF16)).graph.nodes if n.op == "call_function"]
    assert workspace_bytes(node) == 4 * 128 * 128
    node.meta[COMPILED] = True
    assert workspace_bytes(node) == 0


def test_a_plan_for_a_gpu_counts_no_workspace_of_cpu_kernels():
    x = torch.zeros(2, 2, dtype=BF16, device="meta")
    node = next(n for n in make_fx(lambda x: x.mean())(x).graph.nodes if n.op == "call_function")
    assert workspace_bytes(node) == 0
