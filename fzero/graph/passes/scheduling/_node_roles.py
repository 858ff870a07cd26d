"""Roles: each node of a graph is work, or runs late or early."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    LATE,
    collectives_before,
    decodes,
    encodes,
    feeding_work,
    input_only_nodes,
    is_cheap,
    is_collective,
    is_factory,
    is_gather,
    is_input,
    is_maximum,
    is_random,
    is_reduce_collective,
    is_view,
    is_wait,
    is_write,
    nbytes,
    node_stand_ins,
    users_through_views,
    wait_start,
)
from fzero.graph.loop import is_marker

__all__ = ["NodeRoles", "node_roles", "work_in_order"]


class NodeRoles(NamedTuple):
    """The nodes of a graph, except its inputs and its output, by their role.

    Attributes:
        work: nodes that keep their order.
        late: nodes that depend on inputs alone, or that a pass marked. They run right before their first use.
        early: nodes that no work needs, and reductions. They run as soon as they can.
    """

    work: list[Node]
    late: set[Node]
    early: set[Node]


def node_roles(graph: Graph) -> NodeRoles:
    """Give each node of a graph its role."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    feeds_work = feeding_work(graph)
    late = _late_nodes(nodes, feeds_work) | {n for n in nodes if LATE in n.meta and n not in feeds_work}
    late |= _waiting_nodes(nodes, feeds_work, late)
    early = _early_nodes(nodes, feeds_work, late)
    return NodeRoles([n for n in nodes if n not in late and n not in early], late, early)


def _late_nodes(nodes: Sequence[Node], feeds_work: set[Node]) -> set[Node]:
    """List the nodes to postpone until they are needed: they depend on inputs alone, and waiting holds less memory."""
    movable = input_only_nodes(nodes)
    late: set[Node] = set()
    for n in reversed(nodes):
        if n in movable:
            is_light = is_view(n) or is_gather(n) or is_wait(n) or is_factory(n)
            of_codec = encodes(n) or decodes(n) or is_maximum(n)
            if is_light or of_codec or n not in feeds_work or all(u in late for u in n.users):
                late.add(n)
    return late


def _waiting_nodes(nodes: Sequence[Node], feeds_work: set[Node], late: set[Node]) -> set[Node]:
    """List the nodes that only nodes after a further collective use, if their results are larger than their operands.

    An example is a unit's new state, which is used only if all gradients are finite. It is computed after that check;
    otherwise the new states of all units would wait for the check at once.
    """
    collective_counts = collectives_before(nodes)
    postponed: set[Node] = set()
    for n in reversed(nodes):
        if n in feeds_work or n in late or not is_cheap(n) or is_wait(n) or is_collective(n) or is_write(n):
            continue
        users = [u for u in n.users if u not in postponed]  # the output has no count, so its operands never wait
        if n.users and all(collective_counts.get(u, -1) > collective_counts[n] and not is_collective(u) for u in users):
            postponed.add(n)
    return {n for part in _connected_parts(nodes, postponed) if _grows_memory(part, late) for n in part}


def _connected_parts(nodes: Sequence[Node], members: set[Node]) -> list[set[Node]]:
    """Divide nodes into parts that share no values except 0-d ones."""
    part: dict[Node, set[Node]] = {}
    for n in nodes:
        if n in members:
            group = {n}
            for a in n.all_input_nodes:
                if a in part and a not in group and any(x.dim() for x in node_stand_ins(a)):
                    group |= part[a]
            part |= dict.fromkeys(group, group)
    return list({id(x): x for x in part.values()}.values())


def _grows_memory(part: set[Node], late: set[Node]) -> bool:
    """Return whether a part's outputs are larger than its inputs, without arguments and late nodes."""
    inputs = {a for n in part for a in n.all_input_nodes if a not in part and a not in late and not is_input(a)}
    outputs = {n for n in part if any(u not in part for u in n.users)}
    return nbytes(*[x for n in outputs for x in node_stand_ins(n)]) > nbytes(
        *[x for a in inputs for x in node_stand_ins(a)]
    )


def _early_nodes(nodes: Sequence[Node], feeds_work: set[Node], late: set[Node]) -> set[Node]:
    """List the nodes that no work needs, and each reduction with the nodes that pack its operand."""
    early = {n for n in nodes if n not in feeds_work and n not in late}
    for n in reversed(nodes):
        if n not in late and is_cheap(n) and not is_write(n):
            waits = is_wait(n) and is_reduce_collective(wait_start(n))
            if waits or is_reduce_collective(n) or (n.users and all(u in early for u in n.users)):
                early.add(n)
    return early


def work_in_order(work: Sequence[Node]) -> list[Node]:
    """Put the gradient of an activation before the gradient of a weight, which no work waits for.

    Autograd computes the weight's gradient first: it would be live during a gather that the activation's gradient
    needs. The two are consecutive costly nodes, with only cheap nodes between them, that share an operand.
    """
    among = set(work)
    order: list[Node] = []
    leaf: int | None = None  # the position of the last costly node, if no work needs it
    for n in work:
        if is_cheap(n):
            order.append(n)
            continue
        if is_marker(n):  # no node moves past the end of a region
            order.append(n)
            leaf = None
            continue
        needed_nodes = _is_needed(n, among)
        if leaf is not None and needed_nodes and not is_random(n) and _base_values(order[leaf]) & _base_values(n):
            order += [n, order.pop(leaf)]
            leaf = None
            continue
        leaf = None if needed_nodes or is_random(n) else len(order)
        order.append(n)
    return order


def _is_needed(node: Node, work: set[Node]) -> bool:
    return any(u in work for u in users_through_views(node))


def _base_values(node: Node) -> set[Node]:
    """Return the values that a node's arguments are or view."""
    bases = set()
    for a in node.all_input_nodes:
        while is_view(a):
            a = a.all_input_nodes[0]
        bases.add(a)
    return bases
