"""drop_lone_collectives: a collective over one rank is replaced by its operand."""

from collections.abc import Collection, Sequence

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir import (
    copy_graph,
    graph_results,
    is_collective,
    is_input,
    is_wait,
    node_stand_ins,
    signature,
    storages,
    views_and_users,
    wait_source,
)

__all__ = ["drop_lone_collectives"]


def drop_lone_collectives(graph: Graph, groups: Collection[str]) -> Graph:
    """Remove the collectives over groups of one rank.

    On `dp=1, ep=8` experts are sharded over the one rank of `dp`: the gather of an expert, and the sum of its
    gradients, would be copies. A collective stays if a result of the graph shares its memory, and its operand's memory
    is that of an argument or of a result: otherwise both would share memory.

    Args:
        graph: a flat graph, as traced.
        groups: the names of the process groups of one rank.

    Returns:
        A graph with the same results, bit for bit.
    """
    if not any(_runs_over(n, groups) for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    memory, index = storages(graph).indices, {n: i for i, n in enumerate(graph.nodes)}
    output_storages = {s for value in graph_results(graph) if isinstance(value, Node) for s in memory[value]}
    callers_storages = output_storages | {s for n in graph.nodes if is_input(n) for s in memory[n]}
    for wait in [n for n in graph.nodes if is_wait(n) and _runs_over(wait_source(n), groups)]:
        start = wait_source(wait)
        operand = start.all_input_nodes[0]
        is_handed_out = output_storages & {*memory[wait]} and callers_storages & {*memory[operand]}
        if not is_handed_out and signature(node_stand_ins(operand)[0]) == signature(node_stand_ins(wait)[0]):
            if output_storages & {*memory[wait]}:
                callers_storages |= {*memory[operand]}  # its memory is a result's now
            views = views_and_users(wait)[0][1:]
            wait.replace_all_uses_with(operand)
            graph.erase_node(wait)
            _update_stand_ins(sorted(views, key=index.__getitem__))
            if not start.users:
                graph.erase_node(start)
    return graph


def _update_stand_ins(views: Sequence[Node]) -> None:
    """Recompute the stand-ins of views, so that they lie in the memory of their new bases."""
    for node in views:
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
        node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def _runs_over(node: Node, groups: Collection[str]) -> bool:
    return is_collective(node) and any(isinstance(x, str) and x in groups for x in node.args)
