"""A gathered unit is freed if other units come between its uses, and gathered again."""

import functools
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero.graph.ir import (
    TO_DEVICE,
    copy_graph,
    is_gather,
    is_input,
    nbytes,
    node_stand_ins,
    only_feeds,
    parameter_gathers,
    views_and_users,
)
from fzero.graph.loop import BEGIN_REGION
from fzero.graph.passes._duplicate import clusters, duplicate

__all__ = ["regather"]


def regather(graph: Graph, max_reuse_bytes: float = 0) -> Graph:
    """Gather a unit again if more than `max_reuse_bytes` of other units are used between two of its uses.

    This is the re-gather of ZeRO-3 (DeepSpeed's `max_reuse_distance`, FSDP2's `reshard_after_forward`). It needs no
    marker of the forward and the backward pass.

    Args:
        graph: a flat graph.
        max_reuse_bytes: how many bytes of other units may be used while a gathered unit stays in memory;
            `math.inf` for no re-gather.

    Returns:
        A graph with the same results, bit for bit, and the same collectives up to repeated gathers of inputs.
    """
    if max_reuse_bytes == math.inf:
        return graph
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    # a gather of one tensor has one wait; coalesced gathers stay unchanged
    waits = [w for g in parameter_gathers(graph) if isinstance(g.meta["val"], torch.Tensor) for w in g.users]
    waits = [w for w in waits if not only_feeds(w, is_gather)]  # a part stays for its gathers over the next axis
    views, uses = {}, {}
    for wait in waits:
        views[wait], users = views_and_users(wait, decoded=True)
        uses[wait] = sorted((u for u in users if u.op != "output"), key=index.__getitem__)
        if len(uses[wait]) < len(users):  # a result of the graph must stay in memory
            uses[wait] = []
    order = _use_order(uses, index)
    for wait in waits:
        are_apart = functools.partial(_exceeds_reuse, order, max_reuse_bytes, wait)
        for cluster in clusters(uses[wait], are_apart)[1:]:
            duplicate(graph, [wait.all_input_nodes[0], wait], views[wait], cluster, index)
    _reload_from_host(graph)
    graph.eliminate_dead_code()
    return graph


def _reload_from_host(graph: Graph) -> None:
    """Copy a shard on the host to the device again for each of its gathers, so that the copy is freed in between."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    visited = set()
    for gather in parameter_gathers(graph):
        chain = _host_chain(gather, index)
        if visited.intersection(chain):
            duplicate(graph, chain, chain[-1:], [gather], index)
        visited.update(chain)


def _host_chain(gather: Node, index: Mapping[Node, int]) -> list[Node]:
    """List, in order, the nodes that bring a gather's operand from the host; none if the shard lies on the device."""
    nodes: set[Node] = set()
    todo = gather.all_input_nodes
    while todo:
        node = todo.pop()
        if not is_input(node) and node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    return sorted(nodes, key=index.__getitem__) if any(n.target is TO_DEVICE for n in nodes) else []


class _UseOrder(NamedTuple):
    """All uses of gathered units in their order.

    Attributes:
        waits: for each use, the wait for the unit that is used.
        rank: the position of each pair of a use and a wait.
        region_index: the number of the pipeline's region that each use belongs to.
    """

    waits: list[Node]
    rank: dict[tuple[Node, Node], int]
    region_index: dict[Node, int]


def _use_order(uses: Mapping[Node, Sequence[Node]], index: Mapping[Node, int]) -> _UseOrder:
    pairs = [(use, wait) for wait in uses for use in uses[wait]]
    pairs.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
    begins = [i for n, i in index.items() if n.target is BEGIN_REGION]
    region_index = {use: bisect(begins, index[use]) for use, _ in pairs}
    return _UseOrder([wait for _, wait in pairs], {pair: rank for rank, pair in enumerate(pairs)}, region_index)


def _exceeds_reuse(order: _UseOrder, max_reuse_bytes: float, wait: Node, a: Node, b: Node) -> bool:
    """Return whether more than `max_reuse_bytes` of other units are used between two uses, `a` and `b`, of a unit.

    Between two regions of a pipeline other iterations run, which use units of their own.
    """
    if order.region_index[a] != order.region_index[b]:
        return True
    between, size = {wait}, 0
    for rank in range(order.rank[a, wait] + 1, order.rank[b, wait]):
        other_wait = order.waits[rank]
        if other_wait not in between:
            between.add(other_wait)
            size += nbytes(*node_stand_ins(other_wait))
            if size > max_reuse_bytes:
                return True
    return False
