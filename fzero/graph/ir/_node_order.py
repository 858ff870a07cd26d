"""The order of the nodes of a flat graph: a copy of it, and orders in which no node comes before its operands."""

import heapq
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from fzero._torch import copy_nodes
from fzero.graph.ir._nodes import is_input

__all__ = [
    "check_order",
    "copy_graph",
    "sort_by_needs",
    "sort_graph",
]


def copy_graph(graph: Graph) -> Graph:
    """Copy a graph."""
    return copy_nodes(graph.nodes)


def check_order(graph: Graph) -> None:
    """Check that each node of a graph follows its arguments. `Graph.lint` looks at much more, and takes seconds.

    Raises:
        AssertionError: if a node comes before an argument, or has one of another graph.
    """
    earlier_nodes: set[Node] = set()
    for node in graph.nodes:
        if not earlier_nodes.issuperset(node.all_input_nodes):
            late = next(a for a in node.all_input_nodes if a not in earlier_nodes)
            raise AssertionError(f"fzero.jit scheduled {node} before its argument {late}: please report this")
        earlier_nodes.add(node)


def sort_graph(graph: Graph) -> Graph:
    """Copy a graph with every node after its arguments, and otherwise in the old order.

    An argument that comes too late is moved right before its user. Postponing the user instead would leave nodes that
    wait for nothing, such as values recomputed for the backward pass, long before their use.
    """
    index = {n: i for i, n in enumerate(graph.nodes)}
    order: dict[Node, None] = dict.fromkeys(n for n in graph.nodes if is_input(n))
    for node in graph.nodes:
        stack = [node]
        while stack:
            late_operands = [a for a in stack[-1].all_input_nodes if a not in order]
            if len(stack) > len(index):
                raise RuntimeError(f"{node} needs its own result: a pass joined nodes of which one depends on another")
            if late_operands:
                stack.append(min(late_operands, key=index.__getitem__))
            else:
                order[stack.pop()] = None
    return copy_nodes(order)


def sort_by_needs(nodes: Sequence[Node], needs: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Sort nodes so that each follows its arguments and the further nodes that it `needs`; keep the order otherwise.

    Args:
        nodes: all nodes of a graph.
        needs: for some nodes, the nodes that must run before besides the arguments.
    """
    index = {n: i for i, n in enumerate(nodes)}
    needed_by: dict[Node, list[Node]] = {}
    for n, prerequisites in needs.items():
        for prerequisite in prerequisites:
            needed_by.setdefault(prerequisite, []).append(n)
    unmet_count = {n: len(n.all_input_nodes) + len(needs.get(n, ())) for n in nodes}
    ready = [i for i, n in enumerate(nodes) if not unmet_count[n]]
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in (*node.users, *needed_by.get(node, ())):
            unmet_count[user] -= 1
            if not unmet_count[user]:
                heapq.heappush(ready, index[user])
    return order
