"""Storages have kinds: a value is a gathered parameter, a gradient or another, by what computes and reads it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import COPY, is_cheap, is_gather, is_linear, is_reduce_collective, users_through_views
from fzero.graph.loop import node_loop

__all__ = ["KINDS", "storage_kinds"]
KINDS = ("parameters", "optimizer state", "inputs", "gathered", "activations", "gradients", "buffers")


def storage_kinds(graph: Graph) -> dict[Node, str]:
    """Return the kind of each node's value, from how the node is connected to collectives and to work."""
    kinds: dict[Node, str] = {}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    sums = {a for n in nodes if (loop := node_loop(n)) for a in n.args[len(loop.slices) :][: loop.sum_count]}
    sets = _NodeSets(_find_nodes_after_reductions(nodes), _find_nodes_feeding_work(nodes), sums)
    for n in reversed(nodes):
        kinds[n] = _find_kind(n, sets, kinds)
    return {n: "buffers" if kind == "packed" else kind for n, kind in kinds.items()}


class _NodeSets(NamedTuple):
    """The nodes of a graph by what they are connected to.

    Attributes:
        after_reduce: the nodes that depend on a collective that reduces.
        feeds_work: the nodes whose values reach work.
        sums: the arguments of loops to which gradients are added.
    """

    after_reduce: set[Node]
    feeds_work: set[Node]
    sums: set[Any]


def _find_nodes_after_reductions(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that depend on a collective that reduces."""
    after_reduce: set[Node] = set()
    for n in nodes:
        if is_reduce_collective(n) or any(a in after_reduce for a in n.all_input_nodes):
            after_reduce.add(n)
    return after_reduce


def _find_nodes_feeding_work(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes whose values reach work, at once or through cheap nodes."""
    feeds_work: set[Node] = set()
    for n in reversed(nodes):
        if not is_cheap(n) or n in feeds_work:
            feeds_work.update(n.all_input_nodes)
    return feeds_work


def _find_kind(node: Node, sets: _NodeSets, kinds: dict[Node, str]) -> str:
    """Return the kind of a node's value, "packed" for packed gradients; `kinds` has those of all later nodes."""
    users = list(node.users)
    if is_gather(node):
        return "gathered"
    if is_reduce_collective(node) or node in sets.sums or any(u in sets.sums for u in users):
        return "gradients"
    if node in sets.after_reduce and node not in sets.feeds_work:
        return "buffers"
    if users and all(is_reduce_collective(u) for u in users_through_views(node)):
        return "packed"
    reaches_work = node in sets.feeds_work
    if users and not reaches_work and all(kinds.get(u) == "packed" or _keeps_gradients(u, kinds) for u in users):
        return "gradients"
    return "buffers" if node.target is COPY else "activations"


def _keeps_gradients(user: Node, kinds: dict[Node, str]) -> bool:
    """Return whether a user of gradients is linear and returns gradients: it scales, sums or reshapes them."""
    return is_linear(user) and kinds.get(user) == "gradients"
