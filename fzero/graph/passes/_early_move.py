"""early_move: a factor that is known late does not hold up the copy of what it scales to the host."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph._ir import SCALINGS, aten, copied, is_input, values
from fzero.graph._ops import is_view
from fzero.graph._storages import DOWN

__all__ = ["early_move"]


def early_move(graph: Graph) -> Graph:
    """Copy gradients to the host before they are scaled by a number, and scale them there.

    A clip by the global norm is such a case: its factor is known when the last gradient is, and all copies to the host
    would wait for it. The number is copied, too, and one move of it does for all.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results, bit for bit; the graph itself if nothing moves to the host.
    """
    if not any(n.target is DOWN for n in graph.nodes):
        return graph
    graph = copied(graph)
    moved: dict[Node, Node] = {}  # each number, and its copy on the host
    for node in [n for n in graph.nodes if n.target is DOWN]:
        views, scaling = _viewed(node.all_input_nodes[0])
        parts = _scaled(scaling)
        if parts is None:
            continue
        x, factor, first = parts
        if factor not in moved:
            with graph.inserting_after(factor):
                moved[factor] = _call(graph, factor, DOWN, (factor,))
        with graph.inserting_before(node):
            for view in reversed(views):
                x = _call(graph, view, view.target, (x, *view.args[1:]), view.kwargs)
            below, number = _call(graph, node, DOWN, (x,)), moved[factor]
            operands = (below, number) if first else (number, below)
            node.replace_all_uses_with(_call(graph, scaling, scaling.target, operands))
    graph.eliminate_dead_code()
    return graph


def _viewed(node: Node) -> tuple[list[Node], Node]:
    """Return the views that a value is made by, the last one first, and what they view."""
    views = []
    while is_view(node) and len(node.all_input_nodes) == 1 and isinstance(node.args[0], Node):
        views.append(node)
        node = node.all_input_nodes[0]
    return views, node


def _scaled(node: Node) -> tuple[Node, Node, bool] | None:
    """Return what a node scales, by which number, and whether the former stands first; None if it does anything else.

    The number is one that the graph computes.
    """
    if node.target not in SCALINGS or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    x, y = node.all_input_nodes
    first = bool(values(x)[0].dim())
    if not first and node.target is aten.mul.Tensor:
        x, y = y, x
    kept = values(x)[0].dtype == values(node)[0].dtype
    return (x, y, first) if kept and values(x)[0].dim() and not values(y)[0].dim() and not is_input(y) else None


def _call(graph: Graph, like: Node, target: Any, args: Sequence[Any], kwargs: Any = None) -> Node:
    """Add an operation that has the source line of another."""
    made = graph.call_function(target, tuple(args), dict(kwargs or {}))
    known = map_arg((made.args, made.kwargs), lambda a: a.meta["val"])
    made.meta = {**like.meta, "val": target(*known[0], **known[1])}
    return made
