"""Cheap values are computed again for their late uses, and freed in between."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import OpOverload
from fzero.graph.ir import (
    COPY,
    copy_graph,
    feeding_work,
    is_cheap,
    is_collective,
    is_input,
    is_move,
    is_uninitialized,
    is_view,
    is_wait,
    nbytes,
    node_stand_ins,
    views_and_users,
)
from fzero.graph.loop import BEGIN_REGION
from fzero.graph.passes._duplicate import clusters, duplicate

__all__ = ["MIN_BYTES", "recompute"]


MIN_BYTES = 1 << 14  # bytes; repeating the computation of a smaller value does not pay
_DISTANCE_FACTOR = 4  # two uses are apart if more than 4 times the value's bytes are computed between them
_BETWEEN_REGIONS = 1 << 60  # bytes: stands for the other micro-batches that run between a micro-batch's two regions
_MAX_CHAIN_LENGTH = 4  # the longest chain of operations to recompute


def recompute(graph: Graph, min_bytes: int = MIN_BYTES) -> Graph:
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
    order = _NodeOrder(
        index={n: i for i, n in enumerate(graph.nodes)},
        bytes_before=[0, *itertools.accumulate(_output_bytes(n) for n in graph.nodes)],
        feeding=feeding_work(graph),
    )
    # in reverse, so that the operands of a recomputed value see their new later use
    for node in reversed([n for n in graph.nodes if _is_repeatable(n)]):
        for result in _result_nodes(node):
            if nbytes(*node_stand_ins(result)) >= min_bytes:
                _recompute_late_uses(graph, node, result, order)
    graph.eliminate_dead_code()
    return graph


class _NodeOrder(NamedTuple):
    """The order of a graph's nodes.

    Attributes:
        index: the position of each node; a copy has that of its first use.
        bytes_before: for each position, the bytes that the nodes before it compute.
        feeding: the nodes that matrix products depend on, and these products.
    """

    index: dict[Node, int]
    bytes_before: Sequence[int]
    feeding: set[Node]


def _recompute_late_uses(graph: Graph, node: Node, result: Node, order: _NodeOrder) -> None:
    """Compute a node again before each late use of one of its results, where its operands are live."""
    views, users = views_and_users(result)
    sources = [node] if result is node else [node, result]
    for cluster in _late_uses(result, users, order):
        position = order.index[cluster[0]]
        if cluster[0] in order.feeding and all(
            _is_live(x, position, order.index, _MAX_CHAIN_LENGTH) for x in node.all_input_nodes
        ):
            copies = duplicate(graph, sources, views, cluster, order.index)
            order.index.update(dict.fromkeys(copies, position))


def _late_uses(value: Node, users: Sequence[Node], order: _NodeOrder) -> list[list[Node]]:
    """List the uses of a value that lie apart from the first ones, and from each other; none of a graph's result."""
    if any(u.op == "output" for u in users):
        return []
    size = nbytes(*node_stand_ins(value))

    def apart(a: Node, b: Node) -> bool:
        return order.bytes_before[order.index[b]] - order.bytes_before[order.index[a] + 1] > _DISTANCE_FACTOR * size

    return clusters(sorted(users, key=order.index.__getitem__), apart)[1:]


def _output_bytes(node: Node) -> int:
    if node.target is BEGIN_REGION:
        return _BETWEEN_REGIONS
    return 0 if is_input(node) or is_view(node) else nbytes(*node_stand_ins(node))


def _is_repeatable(node: Node) -> bool:
    """Return whether a node is cheap, and computes the same whenever it runs."""
    if is_view(node) or is_wait(node) or is_collective(node) or is_move(node) or node.target is COPY:
        return False
    return isinstance(node.target, OpOverload) and is_cheap(node) and not is_uninitialized(node)


def _result_nodes(node: Node) -> Sequence[Node]:
    """Return the nodes of a node's tensors: the node itself, or the items of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor)]


def _is_live(node: Node, position: int, index: Mapping[Node, int], depth: int) -> bool:
    """Return whether a value is live at a position: an argument, a value with later uses, or one to recompute."""
    value = _viewed_value(node)
    if is_input(value):
        return True
    if any(index.get(user, position) >= position for user in views_and_users(value)[1]):
        return True
    source = value.all_input_nodes[0] if value.target is operator.getitem else value
    return (
        depth > 0
        and _is_repeatable(source)
        and all(_is_live(x, position, index, depth - 1) for x in source.all_input_nodes)
    )


def _viewed_value(node: Node) -> Node:
    """Return the value that a view shows: an operation's result, or the one item of its tuple.

    The items of a tuple are freed one by one. A layer norm's backward pass makes a gradient that is used at once, and
    one of the weights, which is live until it is reduced.
    """
    while is_view(node) and not (node.target is operator.getitem and not is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node
