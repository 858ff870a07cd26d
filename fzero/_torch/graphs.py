"""Private torch APIs that copy a graph.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_graphs.py` shows which.
"""

from collections.abc import Iterable

from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = ["copy_nodes"]


def copy_nodes(order: Iterable[Node]) -> Graph:
    """Copy nodes of one graph into a new graph, in this order and with their names.

    It does the work of `Graph.node_copy` without its two slow parts: searching each node's arguments for symbolic
    numbers, and searching for a free name.

    Raises:
        KeyError: if a node comes before one of its arguments.
    """
    graph = Graph()
    copies = dict[Node, Node]()
    names, table = graph._graph_namespace, graph._find_nodes_lookup_table
    insert, find = graph._insert, copies.__getitem__
    node = None
    for node in order:
        args = map_arg(node.args, find)
        kwargs = map_arg(node.kwargs, find) if node.kwargs else {}
        copy = Node(graph, node.name, node.op, node.target, args, kwargs, node.type)  # pyright: ignore[reportArgumentType]
        copy.meta.update(node.meta)
        insert(copy)
        table.insert(copy)
        copies[node] = copy
    if node is not None:
        names._base_count.update(node.graph._graph_namespace._base_count)
    names._obj_to_name.update({copy: copy.name for copy in copies.values()})
    names._used_names.update(names._obj_to_name.values())
    graph._len = len(copies)
    return graph
