"""Values that a compiler computes within the kernel that reads them, and never stores."""

from collections.abc import Sequence, Set

from torch.fx import Node

from fzero.graph.ir import CASTS, COPY, FUSED, is_factory, is_pointwise, node_stand_ins, op_name, users_through_views
from fzero.graph.planning._subgraphs import split_into_subgraphs

__all__ = ["is_pointwise_kernel", "is_tensor_reduction", "unstored_values"]


_TENSOR_REDUCTIONS = {"sum", "mean", "linalg_vector_norm", "amax", "amin", "any", "all"}


def is_pointwise_kernel(node: Node) -> bool:
    """Return whether a compiler makes a pointwise kernel of a node: it computes one tensor, element by element."""
    by_element = is_pointwise(node) or is_factory(node) or node.target is COPY or node.target in CASTS
    return node.op == "call_function" and by_element and len(node_stand_ins(node)) == 1


def is_tensor_reduction(node: Node) -> bool:
    """Return whether a node reduces a tensor, as by a sum."""
    return op_name(node) in _TENSOR_REDUCTIONS


def unstored_values(
    order: Sequence[Node], scalars: Set[Node] | None = None, host: Set[Node] | None = None
) -> set[Node]:
    """Return the values that `mark_fused` marked and that take no memory in an order.

    All readers of such a value are compiled with it, and only pointwise kernels stand between. If a reduction or a
    matrix product stands between a value and a reader, the value is stored.

    Args:
        order: the nodes of a graph, in an order in which they can run.
        scalars: the graph's scalars; computed if None.
        host: the values that lie in host memory; found if None.
    """
    if not any(FUSED in n.meta for n in order):
        return set()
    unstored: set[Node] = set()
    for subgraph in split_into_subgraphs(order, scalars, host):
        kernel_id: dict[Node, int] = {}  # kernels that a compiler may fuse have equal numbers
        count = 0
        for n in subgraph:
            count += not is_pointwise_kernel(n) and not is_tensor_reduction(n)
            kernel_id[n] = count
            count += is_tensor_reduction(n)
        unstored |= {
            n
            for n in subgraph
            if FUSED in n.meta and all(kernel_id.get(u) == kernel_id[n] for u in users_through_views(n))
        }
    return unstored
