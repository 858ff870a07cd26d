"""keep_on_host: parameters are not moved to the host for the backward pass; other values are copied once."""

from torch.fx import Graph, Node

from fzero.graph._ir import CASTS, copy_graph, is_gather, is_input, is_wait, users_through_views
from fzero.graph._ops import is_view
from fzero.graph._storages import DOWN, UP

__all__ = ["keep_on_host"]


def keep_on_host(graph: Graph) -> Graph:
    """Remove round trips of parameters to the host, and copy every other value to the host only once.

    A block with `remat(save="host")` saves its full parameters besides its activations. Full parameters are arguments
    of the step or gathered from them, so `regather` decides how long they stay in memory.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results, bit for bit; the graph itself if nothing comes back from the host.
    """
    if not any(n.target is UP for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    host_copies: dict[Node, Node] = {}  # each value, and its first copy to the host
    for n in [n for n in graph.nodes if n.target is DOWN]:
        n.replace_all_uses_with(host_copies.setdefault(n.all_input_nodes[0], n))
    parameters = _gathered(graph)
    for n in [n for n in graph.nodes if n.target is DOWN and n.all_input_nodes[0] in parameters]:
        uploads = users_through_views(n)
        if all(u.target is UP for u in uploads):
            for move in (n, *uploads):
                move.replace_all_uses_with(move.all_input_nodes[0])
    graph.eliminate_dead_code()
    return graph


def _gathered(graph: Graph) -> set[Node]:
    """List the inputs, and the values that only gather, cast or view them."""
    found: set[Node] = set()
    for n in graph.nodes:
        is_light = is_view(n) or is_gather(n) or is_wait(n) or n.target in CASTS
        if is_input(n) or (is_light and n.all_input_nodes and all(a in found for a in n.all_input_nodes)):
            found.add(n)
    return found
