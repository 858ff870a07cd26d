"""early_move: a value is copied to the host before it is scaled, so that the copy need not wait for the factor."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph._ir import SCALINGS, aten, copy_graph, is_input, values
from fzero.graph._ops import is_view
from fzero.graph._storages import DOWN

__all__ = ["early_move"]


def early_move(graph: Graph) -> Graph:
    """Copy gradients to the host before they are scaled by a number, and scale them there.

    A clip by the global norm is an example: its factor depends on the last gradient, so all copies to the host would
    wait for that gradient. The factor itself is copied to the host once for all gradients.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results, bit for bit; the graph itself if nothing moves to the host.
    """
    if not any(n.target is DOWN for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    moved: dict[Node, Node] = {}  # each factor, and its copy on the host
    for node in [n for n in graph.nodes if n.target is DOWN]:
        views, scaling = _through_views(node.all_input_nodes[0])
        parts = _scaling_of(scaling)
        if parts is None:
            continue
        x, factor, first = parts
        if factor not in moved:
            with graph.inserting_after(factor):
                moved[factor] = _call(graph, factor, DOWN, (factor,))
        with graph.inserting_before(node):
            for view in reversed(views):
                x = _call(graph, view, view.target, (x, *view.args[1:]), view.kwargs)
            host_copy, number = _call(graph, node, DOWN, (x,)), moved[factor]
            operands = (host_copy, number) if first else (number, host_copy)
            node.replace_all_uses_with(_call(graph, scaling, scaling.target, operands))
    graph.eliminate_dead_code()
    return graph


def _through_views(node: Node) -> tuple[list[Node], Node]:
    """Return the chain of views that leads to a value, the last view first, and the viewed base."""
    views = []
    while is_view(node) and len(node.all_input_nodes) == 1 and isinstance(node.args[0], Node):
        views.append(node)
        node = node.all_input_nodes[0]
    return views, node


def _scaling_of(node: Node) -> tuple[Node, Node, bool] | None:
    """Match a scaling: return the value, the 0-d factor, and whether the value is the first operand; else None.

    A factor that is an input of the graph does not match.
    """
    if node.target not in SCALINGS or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    x, y = node.all_input_nodes
    first = bool(values(x)[0].dim())
    if not first and node.target is aten.mul.Tensor:
        x, y = y, x
    keeps_dtype = values(x)[0].dtype == values(node)[0].dtype
    return (x, y, first) if keeps_dtype and values(x)[0].dim() and not values(y)[0].dim() and not is_input(y) else None


def _call(graph: Graph, like: Node, target: Any, args: Sequence[Any], kwargs: Any = None) -> Node:
    """Add an operation with the metadata of `like`, such as its source line."""
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    fakes = map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
    node.meta = {**like.meta, "val": target(*fakes[0], **fakes[1])}
    return node
