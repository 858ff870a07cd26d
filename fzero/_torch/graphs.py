"""Private torch APIs that copy a graph.

They were seen on torch 2.13. `tests/_torch/test_graphs.py` says which one broke when torch changes.
"""

from collections.abc import Iterable

from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = ["graph_of"]


def graph_of(order: Iterable[Node]) -> Graph:
    """Copy the nodes of a graph into a new one, in this order.

    It is `Graph.node_copy`, node by node, without a search of each node's arguments for symbolic numbers, which takes
    most of its time.

    Raises:
        KeyError: if a node stands before one that it is given.
    """
    graph, copies = Graph(), dict[Node, Node]()
    names, table = graph._graph_namespace, graph._find_nodes_lookup_table
    taken, insert, find = names._obj_to_name, graph._insert, copies.__getitem__
    for node in order:
        name = names.create_name(node.name, None)
        args, kwargs = map_arg(node.args, find), map_arg(node.kwargs, find)
        copy = Node(graph, name, node.op, node.target, args, kwargs, node.type)  # pyright: ignore[reportArgumentType]
        copy.meta.update(node.meta)
        taken[copy] = name
        insert(copy)
        table.insert(copy)
        copies[node] = copy
    graph._len = len(copies)
    return graph
