"""host_last: all of the device's work is started before the host computes."""

from torch.fx import Graph, Node

from fzero.graph.ir import COPY, reordered
from fzero.graph.ops import is_view
from fzero.graph.passes._schedule._listing import readers_of_overwritten
from fzero.graph.passes._schedule._roles import made_of_inputs
from fzero.graph.spaces import DOWN, on_host
from fzero.graph.storages import storages

__all__ = ["host_last"]


def host_last(graph: Graph) -> Graph:
    """Put what the host computes, and what waits for it, behind all else of a scheduled graph.

    A segment on the host holds up the thread that launches the device's work (it holds Python's lock while it runs). So
    the device's queue is filled first, and both compute at once. Copies to the host stay where the schedule has them: a
    gradient goes down as soon as it is there.

    Args:
        graph: a scheduled graph.

    Returns:
        The same nodes in an order in which each follows what it needs; the graph itself if nothing lies on the host.
    """
    late = {n for n in on_host(graph.nodes) if _computes(n)}
    if not late:
        return graph
    readers = readers_of_overwritten(graph, storages(graph))
    for n in graph.nodes:  # in order, so that one pass finds all that follow
        waits = any(a in late for a in (*n.all_input_nodes, *readers.get(n, ())))
        if n.op == "call_function" and waits:
            late.add(n)
    made = made_of_inputs([n for n in graph.nodes if n.op == "call_function"])
    for n in reversed(graph.nodes):  # what only they need, such as a cast of a parameter, is made for them
        if n in made and n.target is not DOWN and n.users and all(u in late for u in n.users):
            late.add(n)
    return reordered(graph, sorted(graph.nodes, key=lambda n: _place(n, late)))


def _computes(node: Node) -> bool:
    """Return whether a node is work, and not only a move, a view, or a write of what has just come down."""
    written = node.target is COPY and _moved(node.args[1])
    return node.op == "call_function" and node.target is not DOWN and not is_view(node) and not written


def _moved(source: object) -> bool:
    while isinstance(source, Node) and is_view(source):
        source = source.all_input_nodes[0]
    return isinstance(source, Node) and source.target is DOWN


def _place(node: Node, late: set[Node]) -> int:
    return 2 if node.op == "output" else int(node in late)
