"""recompute: what is cheap is computed again for its late uses, and let go in between."""

import itertools
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fzero._torch import OpOverload
from fzero.graph.ir import (
    COPY,
    copied,
    feeding_work,
    is_cheap,
    is_collective,
    is_input,
    is_wait,
    nbytes,
    values,
)
from fzero.graph.ops import is_view, leaves_memory_as_it_is
from fzero.graph.passes._regather import again, clusters, family

__all__ = ["recompute"]

LEAST = 1 << 14  # bytes of a value from which on it is worth an operation
APART = 4  # times its own bytes, that are computed between two of its uses: then they are apart
DEPTH = 4  # how many operations on end are done again


def recompute(graph: Graph, least: int = LEAST) -> Graph:
    """Compute a cheap value again where its uses lie apart, if all that it is made of is at hand there.

    So an activation function or a normalisation is done again for the backward pass and is not kept from the forward
    pass, as in torch.compile's partitioner. A matrix product is kept, and so is a random draw.

    Args:
        graph: a flat graph.
        least: bytes; smaller values are kept.

    Returns:
        A graph with the same results, bit for bit, and the same collectives.

    References:
        He, Yu: Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023.
    """
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    made = [0, *itertools.accumulate(_bytes_made(n) for n in graph.nodes)]
    work = feeding_work(graph)
    # what is used last is seen first, so that what it is made of sees that it is used again
    for node in reversed(list(graph.nodes)):
        if not _repeats(node):
            continue
        for result in _results(node):
            if nbytes(*values(result)) < least:
                continue
            views, users = family(result)
            if any(u.op == "output" for u in users):
                continue
            limit = APART * nbytes(*values(result))

            def apart(a: Node, b: Node, limit: int = limit) -> bool:
                return made[index[b]] - made[index[a] + 1] > limit

            for cluster in clusters(sorted(users, key=index.__getitem__), apart)[1:]:
                at = index[cluster[0]]
                inputs = node.all_input_nodes
                if cluster[0] in work and all(_at_hand(x, at, index, DEPTH) for x in inputs):
                    sources = [node] if result is node else [node, result]
                    for n in again(graph, sources, views, cluster, index):
                        index[n] = at
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def _bytes_made(node: Node) -> int:
    return 0 if is_input(node) or is_view(node) else nbytes(*values(node))


def _repeats(node: Node) -> bool:
    """Return whether a node is cheap, and computes the same whenever it runs."""
    moves = is_view(node) or is_wait(node) or is_collective(node)
    known = isinstance(node.target, OpOverload) and node.target is not COPY
    return known and not moves and is_cheap(node) and not leaves_memory_as_it_is(node)


def _results(node: Node) -> Sequence[Node]:
    """Return the nodes that stand for a node's tensors: itself, or those that take them out of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor)]


def _at_hand(node: Node, at: int, index: dict[Node, int], depth: int) -> bool:
    """Return whether a value is there at a position: an argument, one that is used later, or made again of such."""
    while is_view(node):
        node = node.all_input_nodes[0]
    if is_input(node):
        return True
    if any(index.get(user, at) >= at for result in _results(node) or [node] for user in family(result)[1]):
        return True
    return depth > 0 and _repeats(node) and all(_at_hand(x, at, index, depth - 1) for x in node.all_input_nodes)
