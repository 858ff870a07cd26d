"""regather: a gathered unit is let go when other units come between its uses, and gathered again."""

import functools
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from fzero.graph.ir import copied, is_gather, is_input, nbytes, values
from fzero.graph.ops import is_view, lays_out

__all__ = ["again", "clusters", "family", "parameter_gathers", "regather"]


def parameter_gathers(graph: Graph) -> list[Node]:
    """List the gathers whose operands depend on the graph's inputs alone: they may run at any time."""
    from_inputs: set[Node] = set()
    found = []
    for node in graph.nodes:
        known = all(a in from_inputs for a in node.all_input_nodes)
        if is_input(node) or (known and lays_out(node)):
            from_inputs.add(node)
        elif is_gather(node) and known:
            found.append(node)
    return found


def family(wait: Node) -> tuple[list[Node], list[Node]]:
    """Return the views of a gathered buffer (itself first), and the nodes that use it through one of them."""
    views, users, seen = [wait], [], {wait}
    for view in views:  # grows as it goes
        for user in view.users:
            if user not in seen:
                seen.add(user)
                (views if is_view(user) else users).append(user)
    return views, users


def regather(graph: Graph, max_reuse_bytes: float = 0) -> Graph:
    """Gather a unit anew where more than `max_reuse_bytes` of other units are used between two of its uses.

    The re-gather of ZeRO-3 (DeepSpeed's `max_reuse_distance`, FSDP2's `reshard_after_forward`): no marker of forward
    and backward is needed.

    Args:
        graph: a flat graph.
        max_reuse_bytes: how many bytes of other units may be used while a gathered unit stays; infinite for no
            re-gather.

    Returns:
        A graph with the same results, bit for bit, and the same collectives up to repeated gathers of inputs.
    """
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    # a gather of one tensor has one wait; coalesced ones stay as they are
    waits = [w for g in parameter_gathers(graph) if isinstance(g.meta["val"], torch.Tensor) for w in g.users]
    views, uses = {}, {}
    for wait in waits:
        views[wait], users = family(wait)
        uses[wait] = sorted((u for u in users if u.op != "output"), key=index.__getitem__)
        if len(uses[wait]) < len(users):  # a result of the graph: it must stay
            uses[wait] = []
    events = _events(uses, index)
    rank = {event: at for at, event in enumerate(events)}

    def let_go(wait: Node, a: Node, b: Node) -> bool:
        """Return whether more than the limit of other units is used between two uses of `wait`."""
        between, held = {wait}, 0
        for at in range(rank[index[a], wait] + 1, rank[index[b], wait]):
            other = events[at][1]
            if other not in between:
                between.add(other)
                held += nbytes(*values(other))
                if held > max_reuse_bytes:
                    return True
        return False

    for wait in waits:
        for cluster in clusters(uses[wait], functools.partial(let_go, wait))[1:]:
            again(graph, [wait.all_input_nodes[0], wait], views[wait], cluster, index)
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def _events(uses: dict[Node, list[Node]], index: dict[Node, int]) -> list[tuple[int, Node]]:
    """List all uses of gathered units in their order: where, and which unit's."""
    return sorted(((index[use], wait) for wait in uses for use in uses[wait]), key=lambda e: (e[0], index[e[1]]))


def clusters(uses: list[Node], apart: Callable[[Node, Node], bool]) -> list[list[Node]]:
    """Split uses wherever two that follow one another are `apart`."""
    found: list[list[Node]] = []
    for use in uses:
        if found and not apart(found[-1][-1], use):
            found[-1].append(use)
        else:
            found.append([use])
    return found


def again(
    graph: Graph, sources: list[Node], views: list[Node], cluster: list[Node], index: dict[Node, int]
) -> list[Node]:
    """Give the uses in `cluster` their own copy of what `sources` compute, and of its views; return the copies."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> None:
        copies[node] = graph.node_copy(node, lambda a: copies.get(a, a))

    with graph.inserting_before(cluster[0]):
        for node in (*sources, *sorted(views[1:], key=index.__getitem__)):
            copy(node)
    for use in cluster:
        for old in views:
            use.replace_input_with(old, copies[old])
    return list(copies.values())
