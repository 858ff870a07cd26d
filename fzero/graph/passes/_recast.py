"""A widening cast runs again for the uses that wait for a collective; its result is freed in between."""

from torch.fx import Graph, Node

from fzero.graph.ir import (
    CASTS,
    LATE,
    SCALINGS,
    collectives_before,
    copy_graph,
    nbytes,
    node_stand_ins,
    views_and_users,
)
from fzero.graph.passes._duplicate import duplicate
from fzero.graph.passes._recompute import MIN_BYTES

__all__ = ["recast"]


def recast(graph: Graph, min_bytes: int = MIN_BYTES) -> Graph:
    """Repeat a cast to a wider dtype for its uses after a collective, if other uses come before that collective.

    A clip by the global norm is an example: the norm reads the float32 copies of all gradients, and each update waits
    for the norm. So all copies would be live at once: twice the bytes of the half-precision gradients, which are live
    anyway. `schedule` runs the second cast right before its use, so that one unit's copy is live at a time.

    Args:
        graph: a flat graph.
        min_bytes: the cast of a smaller value is not repeated.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.

    References:
        DeepSpeed's pull request 2079, which repeats the cast by hand, group by group.
    """
    if not any(_only_widens(n) and nbytes(*node_stand_ins(n)) >= min_bytes for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    collective_counts = collectives_before(graph.nodes)
    for node in list(graph.nodes):
        sources = _operations_from_narrow(node)
        if not sources or nbytes(*node_stand_ins(node)) < min_bytes:
            continue
        views, users = views_and_users(node)
        later = sorted([u for u in users if collective_counts[u] > collective_counts[node]], key=index.__getitem__)
        if not later or len(later) == len(users) or any(u.op == "output" for u in users):
            continue
        for copy in duplicate(graph, sources, views, later, index):
            copy.meta[LATE] = True
    return graph


def _operations_from_narrow(node: Node) -> list[Node]:
    """Return the operations from a narrow value to this wide one: a cast, and scalings by 0-d values after it.

    With a loss scale the norm reads gradients that are divided by the scale.
    """
    chain: list[Node] = []
    while node.target in SCALINGS and not node.kwargs:
        operands = [a for a in node.all_input_nodes if node_stand_ins(a)[0].dim()]
        if len(operands) != 1:
            return []
        chain.insert(0, node)
        (node,) = operands
    return [node, *chain] if _only_widens(node) else []


def _only_widens(node: Node) -> bool:
    """Return whether a node casts a tensor to a dtype of more bytes, and does nothing else."""
    if node.target not in CASTS or not node.all_input_nodes:  # its operand may be a constant
        return False
    (x,), (result,) = node_stand_ins(node.all_input_nodes[0]), node_stand_ins(node)
    return x.dtype.itemsize < result.dtype.itemsize
