"""Workspaces: memory that kernels allocate while they run, as far as it is known."""

from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from fzero.graph.ir import COMPILED, argument_stand_ins, aten, is_pointwise, nbytes, node_stand_ins

__all__ = ["workspace_bytes"]


# These reductions first copy an operand into the dtype in which they compute, if it has another.
_CASTING = {
    aten.mean,
    aten.sum,
    aten.nansum,
    aten.prod,
    aten.cumsum,
    aten.cumprod,
    aten.linalg_vector_norm,
}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward}


def workspace_bytes(node: Node) -> int:
    """Return the bytes that an operation allocates besides its results; 0 if they are not known.

    They are known for three kinds of operation on a CPU: convolutions, reductions in another dtype than the operand's,
    and uncompiled elementwise operations on several dtypes. Measured on torch 2.13; docs/plan.md lists the rest.
    """
    if is_pointwise(node):
        return 0 if COMPILED in node.meta else _promoted_bytes(node)
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _CASTING and packet not in _CONVOLUTIONS:
        return 0
    operands = argument_stand_ins(node)
    if not operands or any(x.device.type != "cpu" for x in operands):
        return 0
    if node.target is aten.convolution.default:
        return max(nbytes(*operands[:2]), nbytes(*node_stand_ins(node)))
    if node.target is aten.convolution_backward.default:
        grad, x, _ = operands[:3]
        mask: Any = node.args[-1]
        return nbytes(grad) + (nbytes(x) if mask[0] else 0)
    return _cast_bytes(packet, operands[0], node_stand_ins(node)[0].dtype) if packet in _CASTING else 0


def _promoted_bytes(node: Node) -> int:
    """Return the bytes of the copies of an operation's narrower operands in the promoted dtype."""
    operands = [x for x in argument_stand_ins(node) if x.is_floating_point() and x.dim()]
    if len({x.dtype for x in operands}) < 2 or any(x.device.type != "cpu" for x in operands):
        return 0
    promoted_dtype = reduce(torch.promote_types, [x.dtype for x in operands])
    return sum([x.numel() * promoted_dtype.itemsize for x in operands if x.dtype is not promoted_dtype])


def _cast_bytes(packet: Any, x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a reduction's operand in the dtype of the sum; 0 if the operand has this dtype."""
    if packet is aten.mean and dtype.itemsize == 2:
        dtype = torch.float32
    return 0 if dtype is x.dtype else x.numel() * dtype.itemsize
