"""mark_fused: values that the compiler need not store are marked, so that a plan does not count them."""

from torch.fx import Graph, Node

from fzero.graph.ir import COMPILED, COPY, FUSED, copy_graph, node_stand_ins, users_through_views
from fzero.graph.planning import is_pointwise_kernel, is_tensor_reduction

__all__ = ["mark_fused"]


def mark_fused(graph: Graph) -> Graph:
    """Mark the values that only kernels over as many elements read: Inductor fuses them into those kernels.

    Args:
        graph: a flat graph.

    Returns:
        The same graph with marks (`FUSED`), also on all pointwise kernels (`COMPILED`). Whether a marked value is
        stored depends on the order too: see `unstored_values`.
    """
    graph = copy_graph(graph)
    for node in graph.nodes:
        if is_pointwise_kernel(node):
            node.meta[COMPILED] = True
        if is_pointwise_kernel(node) and node.target is not COPY and node_stand_ins(node)[0].dim():
            users = users_through_views(node)
            if users and all(_runs_over_elements_of(u, node) for u in users):
                node.meta[FUSED] = True
    return graph


def _runs_over_elements_of(user: Node, node: Node) -> bool:
    """Return whether a user is a kernel over exactly the elements of a value."""
    (x,) = node_stand_ins(node)
    if is_tensor_reduction(user):
        return user.all_input_nodes == [node]
    return is_pointwise_kernel(user) and node_stand_ins(user)[0].numel() == x.numel()
