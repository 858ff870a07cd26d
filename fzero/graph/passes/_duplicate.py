"""Copies of a value for its late uses."""

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph, Node

__all__ = ["clusters", "duplicate"]


def clusters(uses: Sequence[Node], are_apart: Callable[[Node, Node], bool]) -> list[list[Node]]:
    """Split a sequence of uses between two consecutive uses that are `are_apart`."""
    groups: list[list[Node]] = []
    for use in uses:
        if groups and not are_apart(groups[-1][-1], use):
            groups[-1].append(use)
        else:
            groups.append([use])
    return groups


def duplicate(
    graph: Graph, sources: Sequence[Node], views: Sequence[Node], cluster: Sequence[Node], index: Mapping[Node, int]
) -> list[Node]:
    """Compute a value again for some of its uses.

    Args:
        graph: the graph, which is changed.
        sources: the nodes that compute the value, in order.
        views: the value and its views.
        cluster: the uses, in order. They read the copies from now on.
        index: the position of each node.

    Returns:
        The copies of the sources and the views, which are inserted before the first of the uses.
    """
    copies: dict[Node, Node] = {}
    with graph.inserting_before(cluster[0]):
        for node in (*sources, *sorted(views[1:], key=index.__getitem__)):
            copies[node] = graph.node_copy(node, lambda a: copies.get(a, a))
    for use in cluster:
        for old in views:
            use.replace_input_with(old, copies[old])
    return list(copies.values())
