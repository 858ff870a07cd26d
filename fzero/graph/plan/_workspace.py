"""Memory that kernels take for themselves while they run, as far as it is known."""

from typing import Any

from torch.fx import Node

from fzero.graph.ir import aten, nbytes, values, values_of_args

__all__ = ["workspace_bytes"]


def workspace_bytes(node: Node) -> int:
    """Return what an operation allocates beside its results, in bytes; 0 where nothing is known.

    Known are the convolutions of a CPU: oneDNN lays its operands out anew, runs, and lays the result out anew. Measured
    on torch 2.13 (docs/plan.md).
    """
    if node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return 0
    given, made = values_of_args(node), values(node)
    if any(x.device.type != "cpu" for x in given):
        return 0
    if node.target is aten.convolution.default:
        return max(nbytes(*given[:2]), nbytes(*made))
    grad, x, _ = given[:3]
    wants_input: Any = node.args[-1]
    return nbytes(grad) + (nbytes(x) if wants_input[0] else 0)
