"""recompute: cheap values are computed again for their late uses, and let go in between."""

import itertools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from fzero._torch import OpOverload
from fzero.graph._ir import COPY, copied, feeding_work, is_cheap, is_collective, is_input, is_wait, nbytes, values
from fzero.graph._ops import is_view, leaves_memory_as_it_is
from fzero.graph._storages import is_move
from fzero.graph.loop._rank_schedule import BEGINS
from fzero.graph.passes._uses import again, clusters, family

__all__ = ["recompute"]

LEAST = 1 << 14  # bytes of a value from which on another operation is worth its memory
APART = 4  # two uses are apart if more than so many times the value's bytes are computed between them
ELSEWHERE = 1 << 60  # bytes: of the other micro-batches that a pipeline runs between two passes of one
DEPTH = 4  # how many operations, one on the other, are done again


def recompute(graph: Graph, least: int = LEAST) -> Graph:
    """Compute a cheap value again where its uses lie apart, if its operands are at hand there.

    So an activation function or a normalisation is done again for the backward pass, instead of kept from the forward
    pass, as torch.compile's partitioner does. A matrix product and random numbers are kept.

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
    # the last to be used is seen first, so that its operands see that they are used again
    for node in reversed(list(graph.nodes)):
        for result in _results(node) if _repeats(node) else ():
            views, users = family(result)
            for cluster in _late_uses(result, users, least, index, made):
                at = index[cluster[0]]
                if cluster[0] in work and all(_at_hand(x, at, index, DEPTH) for x in node.all_input_nodes):
                    sources = [node] if result is node else [node, result]
                    for n in again(graph, sources, views, cluster, index):
                        index[n] = at
    graph.eliminate_dead_code()
    return graph


def _late_uses(
    value: Node, users: Sequence[Node], least: int, index: Mapping[Node, int], made: Sequence[int]
) -> list[list[Node]]:
    """List the uses of a value that lie apart from the first ones, and from each other.

    Args:
        value: the value.
        users: the nodes that use it.
        least: bytes; of a smaller value, and of a result of the graph, no use counts as late.
        index: the place of each node.
        made: the bytes that the nodes before each place compute.
    """
    size = nbytes(*values(value))
    if size < least or any(u.op == "output" for u in users):
        return []

    def apart(a: Node, b: Node) -> bool:
        return made[index[b]] - made[index[a] + 1] > APART * size

    return clusters(sorted(users, key=index.__getitem__), apart)[1:]


def _bytes_made(node: Node) -> int:
    if node.target is BEGINS:
        return ELSEWHERE
    return 0 if is_input(node) or is_view(node) else nbytes(*values(node))


def _repeats(node: Node) -> bool:
    """Return whether a node is cheap, and computes the same whenever it runs."""
    if is_view(node) or is_wait(node) or is_collective(node) or is_move(node) or node.target is COPY:
        return False
    return isinstance(node.target, OpOverload) and is_cheap(node) and not leaves_memory_as_it_is(node)


def _results(node: Node) -> Sequence[Node]:
    """Return the nodes that stand for a node's tensors: itself, or those that take them out of its tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor)]


def _at_hand(node: Node, at: int, index: Mapping[Node, int], depth: int) -> bool:
    """Return whether a value is there at a place: an argument, one that is used later, or made again of such."""
    while is_view(node):
        node = node.all_input_nodes[0]
    if is_input(node):
        return True
    if any(index.get(user, at) >= at for result in _results(node) or [node] for user in family(result)[1]):
        return True
    return depth > 0 and _repeats(node) and all(_at_hand(x, at, index, depth - 1) for x in node.all_input_nodes)
