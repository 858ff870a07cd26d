"""Uses: where a value is used through its views, and how late uses get a copy of their own."""

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph, Node

from fzero.graph._ops import is_view

__all__ = ["again", "clusters", "family"]


def family(value: Node) -> tuple[list[Node], list[Node]]:
    """Return the views of a value (itself first), and the nodes that use it through one of them."""
    views, users, seen = [value], [], {value}
    for view in views:  # grows as it goes
        for user in view.users:
            if user not in seen:
                seen.add(user)
                (views if is_view(user) else users).append(user)
    return views, users


def clusters(uses: Sequence[Node], apart: Callable[[Node, Node], bool]) -> list[list[Node]]:
    """Split uses wherever two that follow one another are `apart`."""
    found: list[list[Node]] = []
    for use in uses:
        if found and not apart(found[-1][-1], use):
            found[-1].append(use)
        else:
            found.append([use])
    return found


def again(
    graph: Graph, sources: Sequence[Node], views: Sequence[Node], cluster: Sequence[Node], index: Mapping[Node, int]
) -> list[Node]:
    """Compute a value again for some of its uses.

    Args:
        graph: is changed.
        sources: the nodes that compute the value, in order.
        views: the value and its views.
        cluster: the uses, in order. They use the copies from now on.
        index: the place of each node.

    Returns:
        The copies of the sources and the views, which stand before the first of the uses.
    """
    copies: dict[Node, Node] = {}
    with graph.inserting_before(cluster[0]):
        for node in (*sources, *sorted(views[1:], key=index.__getitem__)):
            copies[node] = graph.node_copy(node, lambda a: copies.get(a, a))
    for use in cluster:
        for old in views:
            use.replace_input_with(old, copies[old])
    return list(copies.values())
