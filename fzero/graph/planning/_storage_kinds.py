"""Storages have kinds: a value is a gathered parameter, a gradient or another, by what computes and reads it."""

from torch.fx import Graph, Node

from fzero.graph.ir import COPY, is_cheap, is_gather, is_linear, is_reduce_collective, users_through_views
from fzero.graph.loop._loop import loop_of

__all__ = ["KINDS", "storage_kinds"]
KINDS = ("parameters", "optimizer state", "inputs", "gathered", "activations", "gradients", "buffers")


def storage_kinds(graph: Graph) -> dict[Node, str]:
    """Return the kind of each node's value, from how the node is connected to collectives and to work."""
    kinds: dict[Node, str] = {}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    after_reduce: set[Node] = set()  # all nodes that depend on a collective that reduces
    for n in nodes:
        if is_reduce_collective(n) or any(a in after_reduce for a in n.all_input_nodes):
            after_reduce.add(n)
    feeds_work: set[Node] = set()
    for n in reversed(nodes):
        if not is_cheap(n) or n in feeds_work:
            feeds_work.update(n.all_input_nodes)
    sums = {a for n in nodes if (loop := loop_of(n)) for a in n.args[len(loop.slices) :][: loop.sum_count]}
    for n in reversed(nodes):
        users = list(n.users)
        if is_gather(n):
            kinds[n] = "gathered"
        elif is_reduce_collective(n) or n in sums or any(u in sums for u in users):
            kinds[n] = "gradients"
        elif n in after_reduce and n not in feeds_work:
            kinds[n] = "buffers"
        elif users and all(is_reduce_collective(u) for u in users_through_views(n)):
            kinds[n] = "packed"
        elif (
            users and n not in feeds_work and all(kinds.get(u) == "packed" or _keeps_gradients(u, kinds) for u in users)
        ):
            kinds[n] = "gradients"
        else:
            kinds[n] = "buffers" if n.target is COPY else "activations"
    return {n: "buffers" if kind == "packed" else kind for n, kind in kinds.items()}


def _keeps_gradients(user: Node, kinds: dict[Node, str]) -> bool:
    """Return whether a user of gradients is linear and returns gradients: it scales, sums or reshapes them."""
    return is_linear(user) and kinds.get(user) == "gradients"
