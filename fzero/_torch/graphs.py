"""Private torch APIs that copy a graph.

They were seen on torch 2.11 and 2.13. `tests/_torch/test_graphs.py` says which one broke when torch changes.
"""

from collections.abc import Iterable

from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = ["graph_of"]


def graph_of(order: Iterable[Node]) -> Graph:
    """Copy nodes of one graph into a new one, in this order and under their names.

    It is `Graph.node_copy`, node by node, without what takes most of its time: a search of each node's arguments for
    symbolic numbers, and one for a free name.

    Raises:
        KeyError: if a node stands before one that it is given.
    """
    graph, copies = Graph(), dict[Node, Node]()
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
