"""What a step sends, whoever sends it: a dispatch mode that sees every collective of torch.distributed."""

import contextlib
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import tree
from fzero._torch import rank_group

__all__ = ["Wire"]

# The full buffer of each collective is one of its arguments, or its result; c10d's own and the functional ones.
BUFFERS = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "_allgather_base_": 0,
    "allgather_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "broadcast_": 0,
    "reduce_": 0,
    "alltoall_base_": 1,
    "all_to_all_single": 0,
    "all_reduce": 0,
    "all_reduce_": 0,
    "all_reduce_coalesced": 0,
    "all_reduce_coalesced_": 0,
    "all_gather_into_tensor": "result",
    "all_gather_into_tensor_out": "result",
    "all_gather_into_tensor_coalesced": "result",
    "reduce_scatter_tensor": 0,
    "reduce_scatter_tensor_coalesced": 0,
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_"}


def nbytes(tensors: list[Any]) -> int:
    """Count the bytes of tensors; what is not one (a script object) has none."""
    return sum([x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor)])


def ranks_of(args: Any) -> int:
    """Return the size of the group that a collective runs over, 0 if it names none."""
    for x in args:
        if isinstance(x, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):  # another object, such as an operation
                return dist.ProcessGroup.unbox(x).size()
        if isinstance(x, str):
            with contextlib.suppress(RuntimeError, ValueError):  # the name of an operation, such as "sum"
                return rank_group(x).size()
    return 0


class Wire(TorchDispatchMode):
    """Counts collectives, and the bytes of their full buffers; an all_reduce's twice, as README's table of costs does.

    What one rank does by itself is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = Fraction(0)
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func.name().split("::")
        name = name.split(".")[0]
        if space in ("c10d", "_c10d_functional") and ranks_of(args) == 1:
            return out
        if name == "send":  # one of a collective's n - 1 messages, each 1 / n of its full buffer
            n = ranks_of(args)
            self.collectives += Fraction(1, n - 1)
            self.bytes += int(Fraction(n, n - 1) * nbytes(tree.tensors(args[0])))
        elif space in ("c10d", "_c10d_functional") and name not in SILENT:
            where = BUFFERS[name]  # a KeyError names the collective that is missing here
            self.collectives += 1
            self.bytes += nbytes(tree.tensors(out if where == "result" else args[where])) * (
                2 if "reduce" in name and "scatter" not in name and name != "reduce_" else 1
            )
        return out
