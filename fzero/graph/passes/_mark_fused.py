"""mark_fused: values that the compiler need not store are marked, so that a plan does not count them."""

from torch.fx import Graph, Node

from fzero.graph._ir import COMPILED, COPY, FUSED, copy_graph, stand_ins_of, users_through_views
from fzero.graph.planning._liveness import is_loop, reduces

__all__ = ["mark_fused"]


def mark_fused(graph: Graph) -> Graph:
    """Mark the values that only loops over as many elements read: Inductor fuses them into those loops.

    Args:
        graph: a flat graph.

    Returns:
        The same graph with marks (`FUSED`), also on all loops (`COMPILED`). Whether a marked value is stored depends
        on the order too: see `unstored_values`.
    """
    graph = copy_graph(graph)
    for node in graph.nodes:
        if is_loop(node):
            node.meta[COMPILED] = True
        if is_loop(node) and node.target is not COPY and stand_ins_of(node)[0].dim():
            users = users_through_views(node)
            if users and all(_loops_over(u, node) for u in users):
                node.meta[FUSED] = True
    return graph


def _loops_over(user: Node, node: Node) -> bool:
    """Return whether a user is a loop over exactly the elements of a value."""
    (x,) = stand_ins_of(node)
    if reduces(user):
        return user.all_input_nodes == [node]
    return is_loop(user) and stand_ins_of(user)[0].numel() == x.numel()
