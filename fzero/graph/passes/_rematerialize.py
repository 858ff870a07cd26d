"""Passes that compute or gather a value again for its late uses, so that it is freed in between."""

import functools
import itertools
import math
import operator
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import OpOverload
from fzero.graph._ir import (
    CASTS,
    COPY,
    LATE,
    SCALINGS,
    collectives_before,
    copy_graph,
    feeding_work,
    is_cheap,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    parameter_gathers,
    stand_ins_of,
    views_and_users,
)
from fzero.graph._ops import is_uninitialized, is_view
from fzero.graph._storages import TO_DEVICE, is_move
from fzero.graph.loop._rank_schedule import BEGIN_REGION

__all__ = ["recast", "recompute", "regather"]


# Uses: the uses of a value through its views, and copies of the value for late uses.


def _clusters(uses: Sequence[Node], apart: Callable[[Node, Node], bool]) -> list[list[Node]]:
    """Split a sequence of uses between two consecutive uses that are `apart`."""
    groups: list[list[Node]] = []
    for use in uses:
        if groups and not apart(groups[-1][-1], use):
            groups[-1].append(use)
        else:
            groups.append([use])
    return groups


def _duplicate(
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


# recompute: cheap values are computed again for their late uses, and freed in between.


_MIN_BYTES = 1 << 14  # bytes; repeating the computation of a smaller value does not pay
_APART = 4  # two uses are apart if more than 4 times the value's bytes are computed between them
_BETWEEN_REGIONS = 1 << 60  # bytes: stands for the other micro-batches that run between a micro-batch's two regions
_DEPTH = 4  # the longest chain of operations to recompute


def recompute(graph: Graph, min_bytes: int = _MIN_BYTES) -> Graph:
    """Compute a cheap value again if its uses lie apart and its operands are still live at the later use.

    So an activation function or a normalisation runs again in the backward pass, instead of being saved in the forward
    pass, as in torch.compile's partitioner. Matrix products and random numbers are saved.

    Args:
        graph: a flat graph.
        min_bytes: smaller values are saved.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.

    References:
        He, Yu: Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023.
    """
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    bytes_before = [0, *itertools.accumulate(_output_bytes(n) for n in graph.nodes)]
    work = feeding_work(graph)
    # in reverse, so that the operands of a recomputed value see their new later use
    for node in reversed(list(graph.nodes)):
        for result in _results(node) if _repeats(node) else ():
            views, users = views_and_users(result)
            for cluster in _late_uses(result, users, min_bytes, index, bytes_before):
                at = index[cluster[0]]
                if cluster[0] in work and all(_is_live(x, at, index, _DEPTH) for x in node.all_input_nodes):
                    sources = [node] if result is node else [node, result]
                    for n in _duplicate(graph, sources, views, cluster, index):
                        index[n] = at
    graph.eliminate_dead_code()
    return graph


def _late_uses(
    value: Node, users: Sequence[Node], min_bytes: int, index: Mapping[Node, int], bytes_before: Sequence[int]
) -> list[list[Node]]:
    """List the uses of a value that lie apart from the first ones, and from each other.

    Args:
        value: the value.
        users: the nodes that use it.
        min_bytes: a smaller value, or a result of the graph, has no late uses.
        index: the position of each node.
        bytes_before: for each position, the bytes that the nodes before it compute.
    """
    size = nbytes(*stand_ins_of(value))
    if size < min_bytes or any(u.op == "output" for u in users):
        return []

    def apart(a: Node, b: Node) -> bool:
        return bytes_before[index[b]] - bytes_before[index[a] + 1] > _APART * size

    return _clusters(sorted(users, key=index.__getitem__), apart)[1:]


def _output_bytes(node: Node) -> int:
    if node.target is BEGIN_REGION:
        return _BETWEEN_REGIONS
    return 0 if is_input(node) or is_view(node) else nbytes(*stand_ins_of(node))


def _repeats(node: Node) -> bool:
    """Return whether a node is cheap, and computes the same whenever it runs."""
    if is_view(node) or is_wait(node) or is_collective(node) or is_move(node) or node.target is COPY:
        return False
    return isinstance(node.target, OpOverload) and is_cheap(node) and not is_uninitialized(node)


def _results(node: Node) -> Sequence[Node]:
    """Return the nodes of a node's tensors: the node itself, or the items of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor)]


def _is_live(node: Node, at: int, index: Mapping[Node, int], depth: int) -> bool:
    """Return whether a value is live at a position: an argument, a value with later uses, or one to recompute."""
    value = _viewed(node)
    if is_input(value):
        return True
    if any(index.get(user, at) >= at for user in views_and_users(value)[1]):
        return True
    source = value.all_input_nodes[0] if value.target is operator.getitem else value
    return depth > 0 and _repeats(source) and all(_is_live(x, at, index, depth - 1) for x in source.all_input_nodes)


def _viewed(node: Node) -> Node:
    """Return the value that a view shows: an operation's result, or the one item of its tuple.

    The items of a tuple are freed one by one. A layer norm's backward pass makes a gradient that is used at once, and
    one of the weights, which is live until it is reduced.
    """
    while is_view(node) and not (node.target is operator.getitem and not is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


# regather: a gathered unit is freed if other units come between its uses, and gathered again.


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
    views, uses = {}, {}
    for wait in waits:
        views[wait], users = views_and_users(wait, decoded=True)
        uses[wait] = sorted((u for u in users if u.op != "output"), key=index.__getitem__)
        if len(uses[wait]) < len(users):  # a result of the graph must stay in memory
            uses[wait] = []
    order = _order_of_uses(uses, index)
    for wait in waits:
        apart = functools.partial(_exceeds_reuse, order, max_reuse_bytes, wait)
        for cluster in _clusters(uses[wait], apart)[1:]:
            _duplicate(graph, [wait.all_input_nodes[0], wait], views[wait], cluster, index)
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
            _duplicate(graph, chain, chain[-1:], [gather], index)
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


def _order_of_uses(uses: Mapping[Node, Sequence[Node]], index: Mapping[Node, int]) -> _UseOrder:
    pairs = [(use, wait) for wait in uses for use in uses[wait]]
    pairs.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
    begins = [i for n, i in index.items() if n.target is BEGIN_REGION]
    region_index = {use: bisect(begins, index[use]) for use, _ in pairs}
    return _UseOrder([wait for _, wait in pairs], {pair: at for at, pair in enumerate(pairs)}, region_index)


def _exceeds_reuse(order: _UseOrder, max_reuse_bytes: float, wait: Node, a: Node, b: Node) -> bool:
    """Return whether more than `max_reuse_bytes` of other units are used between two uses, `a` and `b`, of a unit.

    Between two regions of a pipeline other iterations run, which use units of their own.
    """
    if order.region_index[a] != order.region_index[b]:
        return True
    between, size = {wait}, 0
    for at in range(order.rank[a, wait] + 1, order.rank[b, wait]):
        other = order.waits[at]
        if other not in between:
            between.add(other)
            size += nbytes(*stand_ins_of(other))
            if size > max_reuse_bytes:
                return True
    return False


# recast: a widening cast runs again for the uses that wait for a collective; its result is freed in between.


def recast(graph: Graph, min_bytes: int = _MIN_BYTES) -> Graph:
    """Repeat a cast to a wider dtype for its uses after a collective, if other uses come before that collective.

    A clip by the global norm is an example: the norm reads the float32 copies of all gradients, and each update waits
    for the norm. So all copies would be live at once: twice the bytes of the half-precision gradients, which are live
    anyway. `schedule` runs the second cast right before its use, so that one unit's copy is live at a time.

    Args:
        graph: a flat graph.
        min_bytes: the cast of a smaller value is not repeated.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.

    References:
        DeepSpeed's pull request 2079, which repeats the cast by hand, group by group.
    """
    if not any(_widens(n) and nbytes(*stand_ins_of(n)) >= min_bytes for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    before = collectives_before(graph.nodes)
    for node in list(graph.nodes):
        sources = _from_narrow(node)
        if not sources or nbytes(*stand_ins_of(node)) < min_bytes:
            continue
        views, users = views_and_users(node)
        later = sorted([u for u in users if before[u] > before[node]], key=index.__getitem__)
        if not later or len(later) == len(users) or any(u.op == "output" for u in users):
            continue
        for copy in _duplicate(graph, sources, views, later, index):
            copy.meta[LATE] = True
    return graph


def _from_narrow(node: Node) -> list[Node]:
    """Return the operations from a narrow value to this wide one: a cast, and scalings by 0-d values after it.

    With a loss scale the norm reads gradients that are divided by the scale.
    """
    chain: list[Node] = []
    while node.target in SCALINGS and not node.kwargs:
        operands = [a for a in node.all_input_nodes if stand_ins_of(a)[0].dim()]
        if len(operands) != 1:
            return []
        chain.insert(0, node)
        (node,) = operands
    return [node, *chain] if _widens(node) else []


def _widens(node: Node) -> bool:
    """Return whether a node casts a tensor to a dtype of more bytes, and does nothing else."""
    if node.target not in CASTS or not node.all_input_nodes:  # its operand may be a constant
        return False
    (x,), (result,) = stand_ins_of(node.all_input_nodes[0]), stand_ins_of(node)
    return x.dtype.itemsize < result.dtype.itemsize
