"""Which operations are the forward pass, which the backward pass, and which the update."""

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from fzero._torch import is_backward
from fzero.graph._ir import flops, is_reduction
from fzero.graph.loop._scan import loop_of

__all__ = ["PHASES", "phases"]

PHASES = ("forward", "backward", "update")


def phases(graph: Graph) -> dict[Node, str]:
    """Say of each operation of a graph, and of its loops' bodies, which pass it runs in.

    The forward pass ends where the first operation of the backward pass is. What runs after that and feeds none is the
    update, also between gradients. What is computed again for the backward pass is part of it. The forward pass of the
    next micro-batch is told by its products.
    """
    nodes = [n for n in graph.nodes if n.op != "output"]
    of = _phases(nodes)
    for node in nodes:
        if loop := loop_of(node):
            of |= phases(loop.body)
    return of


def _phases(nodes: Sequence[Node]) -> dict[Node, str]:
    marked = {n for n in nodes if is_backward(n) or _has_gradients(n)}
    if not marked:
        return dict.fromkeys(nodes, "forward")
    first = next(i for i, n in enumerate(nodes) if n in marked)
    marked |= {n for n in nodes[first:] if is_reduction(n) and n.meta.get("unit", "") != "(metric)"}
    needed = _ancestors(nodes, marked)
    of, now = {}, "backward"
    for i, n in reversed(list(enumerate(nodes))):
        if n in marked:
            now = "backward"
        elif n in needed and flops(n):  # that of the next micro-batch
            now = "forward"
        of[n] = "forward" if i < first else now if n in needed else "update"
    return of


def _has_gradients(node: Node) -> bool:
    loop = loop_of(node)
    return loop is not None and any(is_backward(n) for n in loop.body.nodes)


def _ancestors(nodes: Sequence[Node], of: Iterable[Node]) -> set[Node]:
    """Return nodes, and all that they need."""
    found = set(of)
    for n in reversed(nodes):
        if n in found:
            found.update(n.all_input_nodes)
    return found
