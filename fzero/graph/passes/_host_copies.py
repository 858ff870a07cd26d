"""Passes over copies to the host: superfluous ones are removed, and the others start earlier."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir import (
    CASTS,
    SCALINGS,
    TO_DEVICE,
    TO_HOST,
    aten,
    copy_graph,
    is_gather,
    is_input,
    is_view,
    is_wait,
    node_stand_ins,
    users_through_views,
)

__all__ = ["keep_on_host", "move_early"]


def keep_on_host(graph: Graph) -> Graph:
    """Remove round trips of parameters to the host, and copy every other value to the host only once.

    A block with `remat(save="host")` saves its full parameters besides its activations. Full parameters are arguments
    of the step or gathered from them, so `regather` decides how long they stay in memory.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results, bit for bit; the graph itself if nothing comes back from the host.
    """
    if not any(n.target is TO_DEVICE for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    host_copies: dict[Node, Node] = {}  # each value, and its first copy to the host
    for n in [n for n in graph.nodes if n.target is TO_HOST]:
        n.replace_all_uses_with(host_copies.setdefault(n.all_input_nodes[0], n))
    parameters = _gathered_values(graph)
    for n in [n for n in graph.nodes if n.target is TO_HOST and n.all_input_nodes[0] in parameters]:
        uploads = users_through_views(n)
        if all(u.target is TO_DEVICE for u in uploads):
            for move in (n, *uploads):
                move.replace_all_uses_with(move.all_input_nodes[0])
    graph.eliminate_dead_code()
    return graph


def _gathered_values(graph: Graph) -> set[Node]:
    """List the inputs, and the values that only gather, cast or view them."""
    gathered_nodes: set[Node] = set()
    for n in graph.nodes:
        is_light = is_view(n) or is_gather(n) or is_wait(n) or n.target in CASTS
        if is_input(n) or (is_light and n.all_input_nodes and all(a in gathered_nodes for a in n.all_input_nodes)):
            gathered_nodes.add(n)
    return gathered_nodes


def move_early(graph: Graph) -> Graph:
    """Copy gradients to the host before they are scaled by a number, and scale them there.

    A clip by the global norm is an example: its factor depends on the last gradient, so all copies to the host would
    wait for that gradient. The factor itself is copied to the host once for all gradients.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results, bit for bit; the graph itself if nothing moves to the host.
    """
    if not any(n.target is TO_HOST for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    host_copies: dict[Node, Node] = {}  # each factor, and its copy on the host
    for node in [n for n in graph.nodes if n.target is TO_HOST]:
        views, scaling = _follow_views(node.all_input_nodes[0])
        parts = _match_scaling(scaling)
        if parts is None:
            continue
        x, factor, is_value_first = parts
        if factor not in host_copies:
            with graph.inserting_after(factor):
                host_copies[factor] = _add_operation(graph, factor, TO_HOST, (factor,))
        with graph.inserting_before(node):
            for view in reversed(views):
                x = _add_operation(graph, view, view.target, (x, *view.args[1:]), view.kwargs)
            host_copy, number = _add_operation(graph, node, TO_HOST, (x,)), host_copies[factor]
            operands = (host_copy, number) if is_value_first else (number, host_copy)
            node.replace_all_uses_with(_add_operation(graph, scaling, scaling.target, operands))
    graph.eliminate_dead_code()
    return graph


def _follow_views(node: Node) -> tuple[list[Node], Node]:
    """Return the chain of views that leads to a value, the last view first, and the viewed base."""
    views = []
    while is_view(node) and len(node.all_input_nodes) == 1 and isinstance(node.args[0], Node):
        views.append(node)
        node = node.all_input_nodes[0]
    return views, node


def _match_scaling(node: Node) -> tuple[Node, Node, bool] | None:
    """Match a scaling: return the value, the 0-d factor, and whether the value is the first operand; else None.

    A factor that is an input of the graph does not match.
    """
    if node.target not in SCALINGS or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    x, y = node.all_input_nodes
    is_value_first = bool(node_stand_ins(x)[0].dim())
    if not is_value_first and node.target is aten.mul.Tensor:
        x, y = y, x
    keeps_dtype = node_stand_ins(x)[0].dtype == node_stand_ins(node)[0].dtype
    return (
        (x, y, is_value_first)
        if keeps_dtype and node_stand_ins(x)[0].dim() and not node_stand_ins(y)[0].dim() and not is_input(y)
        else None
    )


def _add_operation(graph: Graph, like: Node, target: Any, args: Sequence[Any], kwargs: Any = None) -> Node:
    """Add an operation with the metadata of `like`, such as its source line."""
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    stand_ins = map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
    node.meta = {**like.meta, "val": target(*stand_ins[0], **stand_ins[1])}
    return node
