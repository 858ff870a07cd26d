"""recast: a widening cast is made again for the uses that wait for a collective, and let go in between."""

from torch.fx import Graph, Node

from fzero.graph._ir import CASTS, LATE, SCALINGS, collectives_before, copied, nbytes, values
from fzero.graph.passes._uses import again, family

__all__ = ["recast"]

LEAST = 1 << 14  # bytes of a value from which on another cast is worth its memory


def recast(graph: Graph, least: int = LEAST) -> Graph:
    """Cast a value to a wider dtype again for those of its uses that come after a collective that others come before.

    A clip by the global norm is such a case: the norm reads the float32 copies of all gradients, and the update of each
    waits for the norm. So all copies would be alive at once, twice the bytes of the half-precision gradients, which are
    alive anyway. `schedule` makes the second cast when its use is due, so that one unit's copy is alive at a time.

    Args:
        graph: a flat graph.
        least: bytes; smaller values are kept.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.

    References:
        DeepSpeed's pull request 2079, which does so by hand, group by group.
    """
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    before = collectives_before(graph.nodes)
    for node in list(graph.nodes):
        sources = _from_narrow(node)
        if not sources or nbytes(*values(node)) < least:
            continue
        views, users = family(node)
        later = sorted([u for u in users if before[u] > before[node]], key=index.__getitem__)
        if not later or len(later) == len(users) or any(u.op == "output" for u in users):
            continue
        for copy in again(graph, sources, views, later, index):
            copy.meta[LATE] = True
    return graph


def _from_narrow(node: Node) -> list[Node]:
    """Return the operations that make a wide value of a narrow one: a cast, and what scales it by numbers behind it.

    With a loss scale the norm reads gradients that are divided by it.
    """
    found: list[Node] = []
    while node.target in SCALINGS and not node.kwargs:
        given = [a for a in node.all_input_nodes if values(a)[0].dim()]
        if len(given) != 1:
            return []
        found.insert(0, node)
        (node,) = given
    return [node, *found] if _widens(node) else []


def _widens(node: Node) -> bool:
    """Return whether a node casts a tensor to a dtype of more bytes, and does nothing else."""
    if node.target not in CASTS or not node.all_input_nodes:  # what it casts may be a constant
        return False
    (x,), (made,) = values(node.all_input_nodes[0]), values(node)
    return x.dtype.itemsize < made.dtype.itemsize
