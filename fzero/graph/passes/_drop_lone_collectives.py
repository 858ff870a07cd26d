"""drop_lone_collectives: a collective over one rank is what it was given."""

from collections.abc import Collection, Sequence

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph._ir import awaited, copied, is_collective, is_wait, results, signature, values
from fzero.graph._storages import storages
from fzero.graph.passes._uses import family

__all__ = ["drop_lone_collectives"]


def drop_lone_collectives(graph: Graph, groups: Collection[str]) -> Graph:
    """Leave out the collectives over groups of one rank.

    On `dp=1, ep=8` experts are sharded over the one rank of `dp`. To gather them would be a copy, and so would the sum
    of their gradients be. A collective that a result of the graph lies in stays: the result would lie in an argument,
    or in another result.

    Args:
        graph: a flat graph, as it was traced.
        groups: the names of the process groups of one rank.

    Returns:
        A graph with the same results, bit for bit.
    """
    if not any(_runs_over(n, groups) for n in graph.nodes):
        return graph
    graph = copied(graph)
    memory, index = storages(graph).of, {n: i for i, n in enumerate(graph.nodes)}
    handed = {s for value in results(graph) if isinstance(value, Node) for s in memory[value]}
    for wait in [n for n in graph.nodes if is_wait(n) and _runs_over(awaited(n), groups)]:
        start = awaited(wait)
        given = start.all_input_nodes[0]
        if not handed & {*memory[wait]} and signature(values(given)[0]) == signature(values(wait)[0]):
            views = family(wait)[0][1:]
            wait.replace_all_uses_with(given)
            graph.erase_node(wait)
            _lie_anew(sorted(views, key=index.__getitem__))
            if not start.users:
                graph.erase_node(start)
    return graph


def _lie_anew(views: Sequence[Node]) -> None:
    """Let stand-ins of views lie in the memory of what they are views of now."""
    for node in views:
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
        node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def _runs_over(node: Node, groups: Collection[str]) -> bool:
    return is_collective(node) and any(isinstance(x, str) and x in groups for x in node.args)
