"""bucket: collectives of small neighbouring units become one."""

import operator
from collections.abc import Callable

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph._wire import full_bytes
from fzero.graph.ir import copied, is_gather, is_reduction, sort, values
from fzero.graph.passes._regather import parameter_gathers

__all__ = ["bucket"]

COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}


def bucket(graph: Graph, max_bytes: int) -> Graph:
    """Join collectives that follow one another, over the same group, into buckets of at most `max_bytes`.

    Gathers of parameters are joined in the order of their first use; reductions in their own order, where the one
    does not need the other's result. The tensors of a bucket stay apart (a coalesced collective): nothing is copied,
    and each is freed by itself.

    Args:
        graph: a flat graph.
        max_bytes: of a bucket's full buffers; 0 joins nothing.

    Returns:
        A graph with the same results.
    """
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    gathers = parameter_gathers(graph)
    gathers.sort(key=lambda g: min((index[u] for w in g.users for u in w.users), default=0))
    reductions = [n for n in graph.nodes if is_reduction(n)]
    _join(graph, gathers, max_bytes, lambda group, n: True)
    _join(graph, reductions, max_bytes, lambda group, n: not _needs(n, group, index))
    return sort(graph)


def _join(graph: Graph, nodes: list[Node], max_bytes: int, may: Callable[[list[Node], Node], bool]) -> None:
    group: list[Node] = []
    for node in [*nodes, None]:
        if (
            node is not None
            and group
            and node.target is group[0].target
            and node.target in COALESCED
            and node.args[1:] == group[0].args[1:]
            and values(node)[0].dtype == values(group[0])[0].dtype
            and sum(map(full_bytes, [*group, node])) <= max_bytes
            and may(group, node)
        ):
            group.append(node)
            continue
        if len(group) > 1:
            _coalesce(graph, group)
        group = [] if node is None else [node]


def _coalesce(graph: Graph, group: list[Node]) -> None:
    # the arguments may lie behind the last member; `sort` puts everything in order
    operands = list(
        dict.fromkeys([n.args[0] for n in group] if is_gather(group[0]) else [])
    )  # a re-gather joins the first
    operands = operands or [n.args[0] for n in group]
    with graph.inserting_before(group[-1]):
        joined = graph.call_function(COALESCED[group[0].target], (operands, *group[0].args[1:]))  # pyright: ignore
        first = [next(n for n in group if n.args[0] is x) for x in operands] if is_gather(group[0]) else group
        joined.meta = {**group[0].meta, "val": [n.meta["val"] for n in first]}
        joined.meta["unit"] = " + ".join(n.meta.get("unit", "") for n in first)
        for i, node in enumerate(group):
            at = operands.index(node.args[0]) if is_gather(node) else i
            item = graph.call_function(operator.getitem, (joined, at))
            item.meta = {**node.meta, "val": joined.meta["val"][at]}
            node.replace_all_uses_with(item)
    for node in group:
        graph.erase_node(node)


def _needs(node: Node, group: list[Node], index: dict[Node, int]) -> bool:
    """Return whether a node depends on the result of one of `group`."""
    first, seen, stack = index[group[0]], {node}, [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a in group:
                return True
            if a not in seen and index.get(a, -1) > first:
                seen.add(a)
                stack.append(a)
    return False
