"""bucket: collectives of small neighbouring units become one."""

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph.ir import (
    copy_graph,
    full_bytes,
    input_only_nodes,
    is_gather,
    is_maximum,
    is_reduce_collective,
    node_stand_ins,
    parameter_gathers,
    sort_graph,
)
from fzero.graph.loop import is_marker

__all__ = ["bucket"]


_COALESCED = {
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
    index = {n: i for i, n in enumerate(graph.nodes)}
    gathers = parameter_gathers(graph)
    first_use = {g: min((index[u] for w in g.users for u in w.users), default=0) for g in gathers}
    gathers.sort(key=first_use.__getitem__)
    reductions = [n for n in graph.nodes if is_reduce_collective(n) and not is_maximum(n)]
    # the maxima of parameters' blocks; a gradient's are few bytes, but to wait for others would hold all gradients
    from_inputs = input_only_nodes(list(graph.nodes))
    maxima = [n for n in graph.nodes if is_maximum(n) and n in from_inputs]
    ends = [i for n, i in index.items() if is_marker(n)]  # the ends of a pipeline's regions; no bucket spans two

    def together(first: int, second: int) -> bool:
        return bisect_left(ends, first) == bisect_left(ends, second)

    def may_join(group: list[Node], n: Node) -> bool:
        return together(index[group[0]], index[n]) and not _depends_on(n, group, index)

    groups = _consecutive_groups(gathers, max_bytes, lambda group, n: together(first_use[group[0]], first_use[n]))
    groups += _consecutive_groups(reductions, max_bytes, may_join) + _consecutive_groups(maxima, max_bytes, may_join)
    if not groups:
        return graph
    names = [[n.name for n in group] for group in groups]
    graph = copy_graph(graph)
    copies = {n.name: n for n in graph.nodes}
    for group in names:
        _coalesce_group(graph, [copies[name] for name in group])
    return sort_graph(graph)


def _consecutive_groups(
    nodes: Sequence[Node], max_bytes: int, may: Callable[[list[Node], Node], bool]
) -> list[list[Node]]:
    """List the groups of consecutive collectives to join; `may` says whether a group may take one more."""
    groups: list[list[Node]] = []
    for node in nodes:
        fits_last_group = bool(groups) and sum(map(full_bytes, [*groups[-1], node])) <= max_bytes
        if fits_last_group and _can_join(groups[-1][0], node) and may(groups[-1], node):
            groups[-1].append(node)
        else:
            groups.append([node])
    return [group for group in groups if len(group) > 1]


def _can_join(first: Node, second: Node) -> bool:
    """Return whether two collectives can be joined: they have one kind, one group and one dtype."""
    have_equal_options = (
        first.target is second.target and first.target in _COALESCED and first.args[1:] == second.args[1:]
    )
    return have_equal_options and node_stand_ins(first)[0].dtype == node_stand_ins(second)[0].dtype


def _coalesce_group(graph: Graph, group: Sequence[Node]) -> None:
    """Replace several collectives by one. Its arguments may come after it: `sort_graph` repairs the order."""
    distinct = list(group)
    if is_gather(group[0]):  # a re-gather shares the item of its operand's first gather
        distinct = [n for i, n in enumerate(group) if all(n.args[0] is not other.args[0] for other in group[:i])]
    index_of = {n.args[0]: i for i, n in enumerate(distinct)}
    with graph.inserting_before(group[-1]):
        arguments = ([n.args[0] for n in distinct], *group[0].args[1:])
        coalesced_node = graph.call_function(_COALESCED[group[0].target], arguments)  # pyright: ignore
        coalesced_node.meta = {**group[0].meta, "val": [n.meta["val"] for n in distinct]}
        coalesced_node.meta["unit"] = " + ".join(n.meta.get("unit", "") for n in distinct)
        for i, node in enumerate(group):
            position = index_of[node.args[0]] if is_gather(node) else i
            item = graph.call_function(operator.getitem, (coalesced_node, position))
            item.meta = {**node.meta, "val": coalesced_node.meta["val"][position]}
            node.replace_all_uses_with(item)
    for node in group:
        graph.erase_node(node)


def _depends_on(node: Node, group: Sequence[Node], index: Mapping[Node, int]) -> bool:
    """Return whether a node depends on the result of one of `group`."""
    first_index, visited, stack = index[group[0]], {node}, [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a in group:
                return True
            if a not in visited and index.get(a, -1) > first_index:
                visited.add(a)
                stack.append(a)
    return False
