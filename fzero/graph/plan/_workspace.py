"""Memory that kernels take for themselves while they run, as far as it is known."""

from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from fzero.graph.ir import COMPILED, aten, nbytes, values, values_of_args
from fzero.graph.ops import is_pointwise

__all__ = ["workspace_bytes"]

# Reductions that first copy an operand of another dtype into the one that they compute in.
CASTING = {
    aten.mean,
    aten.sum,
    aten.nansum,
    aten.prod,
    aten.cumsum,
    aten.cumprod,
    aten.linalg_vector_norm,
}
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}


def workspace_bytes(node: Node) -> int:
    """Return what an operation allocates beside its results, in bytes; 0 where nothing is known.

    Known are a CPU's convolutions, its reductions in another dtype than the operand's, and what it computes element by
    element of several dtypes, unless that is compiled. Measured on torch 2.13; what is left out: docs/plan.md.
    """
    if is_pointwise(node):
        return 0 if COMPILED in node.meta else _promoted_bytes(node)
    reduction = getattr(node.target, "overloadpacket", None)
    if reduction not in CASTING and reduction not in CONVOLUTIONS:
        return 0
    given = values_of_args(node)
    if not given or any(x.device.type != "cpu" for x in given):
        return 0
    if node.target is aten.convolution.default:
        return max(nbytes(*given[:2]), nbytes(*values(node)))
    if node.target is aten.convolution_backward.default:
        grad, x, _ = given[:3]
        wants_input: Any = node.args[-1]
        return nbytes(grad) + (nbytes(x) if wants_input[0] else 0)
    return _cast_bytes(reduction, given[0], values(node)[0].dtype) if reduction in CASTING else 0


def _promoted_bytes(node: Node) -> int:
    """Return the bytes of operands in the dtype that they are computed in with others of a wider one."""
    given = [x for x in values_of_args(node) if x.is_floating_point() and x.dim()]
    if len({x.dtype for x in given}) < 2 or any(x.device.type != "cpu" for x in given):
        return 0
    wide = reduce(torch.promote_types, [x.dtype for x in given])
    return sum([x.numel() * wide.itemsize for x in given if x.dtype is not wide])


def _cast_bytes(reduction: Any, x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a reduction's operand in the dtype that it is reduced in; 0 where that is its own."""
    if reduction is aten.mean and dtype.itemsize == 2:
        dtype = torch.float32
    return 0 if dtype is x.dtype else x.numel() * dtype.itemsize
