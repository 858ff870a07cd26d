"""bucket: collectives of small neighbouring units become one."""

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph._ir import copy_graph, full_bytes, is_gather, is_reduction, parameter_gathers, sort, values
from fzero.graph.loop._rank_schedule import is_marker

__all__ = ["bucket"]

COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
}


def bucket(graph: Graph, max_bytes: int) -> Graph:
    """Join consecutive collectives over the same group into buckets of at most `max_bytes`.

    Gathers of parameters are joined in the order of their first use. Reductions are joined in the graph's order, if
    none needs another's result. A bucket is a coalesced collective: its tensors stay separate, so nothing is copied,
    and each is freed by itself.

    Args:
        graph: a flat graph.
        max_bytes: the largest size of a bucket's full buffers; 0 joins nothing.

    Returns:
        A graph with the same results.
    """
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    gathers = parameter_gathers(graph)
    first_use = {g: min((index[u] for w in g.users for u in w.users), default=0) for g in gathers}
    gathers.sort(key=first_use.__getitem__)
    reductions = [n for n in graph.nodes if is_reduction(n)]
    ends = [i for n, i in index.items() if is_marker(n)]  # the ends of a pipeline's phases; no bucket spans two phases

    def together(one: int, other: int) -> bool:
        return bisect_left(ends, one) == bisect_left(ends, other)

    def may_join(group: list[Node], n: Node) -> bool:
        return together(index[group[0]], index[n]) and not _needs(n, group, index)

    _join(graph, gathers, max_bytes, lambda group, n: together(first_use[group[0]], first_use[n]))
    _join(graph, reductions, max_bytes, may_join)
    return sort(graph)


def _join(graph: Graph, nodes: Sequence[Node], max_bytes: int, may: Callable[[list[Node], Node], bool]) -> None:
    """Join consecutive collectives; `may` says whether a group may take one more."""
    groups: list[list[Node]] = []
    for node in nodes:
        fits = bool(groups) and sum(map(full_bytes, [*groups[-1], node])) <= max_bytes
        if fits and _alike(groups[-1][0], node) and may(groups[-1], node):
            groups[-1].append(node)
        else:
            groups.append([node])
    for group in groups:
        if len(group) > 1:
            _coalesce(graph, group)


def _alike(one: Node, other: Node) -> bool:
    """Return whether two collectives can be joined: they have one kind, one group and one dtype."""
    same = one.target is other.target and one.target in COALESCED and one.args[1:] == other.args[1:]
    return same and values(one)[0].dtype == values(other)[0].dtype


def _coalesce(graph: Graph, group: Sequence[Node]) -> None:
    """Replace several collectives by one. Its arguments may come after it: `sort` repairs the order."""
    distinct = list(group)
    if is_gather(group[0]):  # a re-gather shares the item of its operand's first gather
        distinct = [n for i, n in enumerate(group) if all(n.args[0] is not other.args[0] for other in group[:i])]
    place = {n.args[0]: i for i, n in enumerate(distinct)}
    with graph.inserting_before(group[-1]):
        arguments = ([n.args[0] for n in distinct], *group[0].args[1:])
        joined = graph.call_function(COALESCED[group[0].target], arguments)  # pyright: ignore
        joined.meta = {**group[0].meta, "val": [n.meta["val"] for n in distinct]}
        joined.meta["unit"] = " + ".join(n.meta.get("unit", "") for n in distinct)
        for i, node in enumerate(group):
            at = place[node.args[0]] if is_gather(node) else i
            item = graph.call_function(operator.getitem, (joined, at))
            item.meta = {**node.meta, "val": joined.meta["val"][at]}
            node.replace_all_uses_with(item)
    for node in group:
        graph.erase_node(node)


def _needs(node: Node, group: Sequence[Node], index: Mapping[Node, int]) -> bool:
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
