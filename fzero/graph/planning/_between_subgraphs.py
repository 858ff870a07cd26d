"""Between subgraphs: which values later subgraphs need, and which views must exist as values."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch.fx import Node

from fzero.graph.ir import COPY
from fzero.graph.planning._subgraphs import is_alias, runs_alone

__all__ = ["needed_views", "subgraph_exports", "subgraph_operands", "view_sources", "views_to", "written_argument"]


def written_argument(node: Node) -> Node:
    """Return the argument that a write overwrites, which is its result; return any other node itself."""
    while node.target is COPY:
        node = node.all_input_nodes[0]
    return node


def subgraph_operands(subgraph: Sequence[Node]) -> list[Node]:
    """List the arguments of the nodes of a subgraph."""
    return [a for n in subgraph for a in n.all_input_nodes]


def view_sources(nodes: Sequence[Node], parts: AbstractSet[Node] = frozenset()) -> list[Node]:
    """List the values that nodes are or alias; `parts` count as values."""
    values: dict[Node, None] = {}
    stack = list(reversed(nodes))
    visited = set()
    while stack:
        n = stack.pop()
        if n in visited:
            continue
        visited.add(n)
        if is_alias(n) and n not in parts:
            stack += n.all_input_nodes
        else:
            values[written_argument(n)] = None
    return list(values)


def needed_views(subgraphs: Sequence[Sequence[Node]], results: Sequence[Node]) -> set[Node]:
    """List the aliases that must exist as values: operands of subgraphs that run alone, and results of the graph."""
    views: set[Node] = set()
    stack = [a for subgraph in subgraphs if runs_alone(subgraph[0]) for a in subgraph[0].all_input_nodes]
    stack += results
    while stack:
        n = stack.pop()
        if is_alias(n) and n not in views:
            views.add(n)
            stack += n.all_input_nodes
    return views


def subgraph_exports(subgraphs: Sequence[Sequence[Node]], results: Sequence[Node]) -> list[list[Node]]:
    """List for each subgraph the values that later subgraphs or the caller need."""
    subgraph_index = {n: i for i, subgraph in enumerate(subgraphs) for n in subgraph}
    exports_by_subgraph: list[dict[Node, None]] = [{} for _ in subgraphs]
    for i, subgraph in enumerate(subgraphs):
        for x in view_sources(subgraph_operands(subgraph)):
            if x in subgraph_index and subgraph_index[x] != i:
                exports_by_subgraph[subgraph_index[x]][x] = None
    for x in view_sources(results):
        if x in subgraph_index:
            exports_by_subgraph[subgraph_index[x]][x] = None
    return [list(e) for e in exports_by_subgraph]


def views_to(nodes: Sequence[Node], register_of: Mapping[Node, int], view_values: AbstractSet[Node]) -> list[Node]:
    """List the views that must run for `nodes` to have registers, in an order that can run.

    Args:
        nodes: values that are about to be used.
        register_of: the registers of all values computed so far.
        view_values: the views that exist as values.
    """
    views: dict[Node, None] = {}
    stack = [(n, False) for n in reversed(nodes)]
    while stack:
        n, ready = stack.pop()
        if n in register_of or n not in view_values or n in views:
            continue
        if ready:
            views[n] = None
        else:
            stack.append((n, True))
            stack += [(a, False) for a in n.all_input_nodes]
    return list(views)
