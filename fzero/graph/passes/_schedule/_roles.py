"""Roles: which nodes of a graph are work, and which of the others run late or early."""

from collections.abc import Sequence
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    LATE,
    collectives_before,
    feeding_work,
    is_cheap,
    is_collective,
    is_gather,
    is_input,
    is_reduction,
    is_wait,
    is_write,
    nbytes,
    start_of,
    users_through_views,
    values,
)
from fzero.graph.ops import is_factory, is_random, is_view
from fzero.graph.phases import is_marker

__all__ = ["Roles", "made_of_inputs", "roles", "work_in_order"]


class Roles(NamedTuple):
    """The nodes of a graph, but for its inputs and its output, by when they run.

    Attributes:
        work: they keep their order.
        late: they depend on inputs alone, or a pass says so, and run when they are needed.
        early: no work needs them, or they are a reduction; they run when they can.
    """

    work: list[Node]
    late: set[Node]
    early: set[Node]


def roles(graph: Graph) -> Roles:
    """Say of each node of a graph when it runs."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    feeds_work = feeding_work(graph)
    late = _late(nodes, feeds_work) | {n for n in nodes if LATE in n.meta and n not in feeds_work}
    late |= _waiting(nodes, feeds_work, late)
    early = _early(nodes, feeds_work, late)
    return Roles([n for n in nodes if n not in late and n not in early], late, early)


def _late(nodes: Sequence[Node], feeds_work: set[Node]) -> set[Node]:
    """List what can wait until it is needed: it depends on inputs alone, and holds less then than its result."""
    movable = made_of_inputs(nodes)
    late: set[Node] = set()
    for n in reversed(nodes):
        if n in movable:
            light = is_view(n) or is_gather(n) or is_wait(n) or is_factory(n)
            if light or n not in feeds_work or all(u in late for u in n.users):
                late.add(n)
    return late


def _waiting(nodes: Sequence[Node], feeds_work: set[Node], late: set[Node]) -> set[Node]:
    """List what only nodes behind another collective use, where it is larger than what it is made of.

    So the new state of a unit is computed once it is known that all gradients are finite. Before, that of all units
    would wait for it.
    """
    before = collectives_before(nodes)
    found: set[Node] = set()
    for n in reversed(nodes):
        if n in feeds_work or n in late or not is_cheap(n) or is_wait(n) or is_collective(n) or is_write(n):
            continue
        users = [u for u in n.users if u not in found]  # the output is before nothing
        if n.users and all(before.get(u, -1) > before[n] and not is_collective(u) for u in users):
            found.add(n)
    return {n for part in _joined(nodes, found) if _grows(part, late) for n in part}


def _joined(nodes: Sequence[Node], chosen: set[Node]) -> list[set[Node]]:
    """Divide nodes into parts that share no value but numbers."""
    part: dict[Node, set[Node]] = {}
    for n in nodes:
        if n in chosen:
            mine = {n}
            for a in n.all_input_nodes:
                if a in part and a not in mine and any(x.dim() for x in values(a)):
                    mine |= part[a]
            part |= dict.fromkeys(mine, mine)
    return list({id(x): x for x in part.values()}.values())


def _grows(part: set[Node], late: set[Node]) -> bool:
    """Return whether what is handed on is larger than what is kept for it: no arguments, nor what is made of them."""
    given = {a for n in part for a in n.all_input_nodes if a not in part and a not in late and not is_input(a)}
    handed = {n for n in part if any(u not in part for u in n.users)}
    return nbytes(*[x for n in handed for x in values(n)]) > nbytes(*[x for a in given for x in values(a)])


def made_of_inputs(nodes: Sequence[Node]) -> set[Node]:
    """List the cheap nodes that depend on inputs alone, through cheap nodes."""
    found: set[Node] = set()
    for n in nodes:
        movable = is_cheap(n) and not is_reduction(n) and not is_write(n)
        if movable and all(is_input(a) or a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def _early(nodes: Sequence[Node], feeds_work: set[Node], late: set[Node]) -> set[Node]:
    """List what no work needs, and each reduction with the nodes that pack its operand, though work may need it."""
    early = {n for n in nodes if n not in feeds_work and n not in late}
    for n in reversed(nodes):
        if n not in late and is_cheap(n) and not is_write(n):
            waits = is_wait(n) and is_reduction(start_of(n))
            if waits or is_reduction(n) or (n.users and all(u in early for u in n.users)):
                early.add(n)
    return early


def work_in_order(work: Sequence[Node]) -> list[Node]:
    """Let the gradient that goes on backward come before the one of a weight, which nothing waits for.

    Autograd computes them in the other order, and a gather that the former needs would find the latter alive. Both are
    dear nodes that follow one another, with cheap ones between them, and share an operand.
    """
    among = set(work)
    order: list[Node] = []
    leaf: int | None = None  # the place of the last dear node, if no work needs it
    for n in work:
        if is_cheap(n):
            order.append(n)
            continue
        if is_marker(n):  # none passes over the end of a phase
            order.append(n)
            leaf = None
            continue
        needed = _is_needed(n, among)
        if leaf is not None and needed and not is_random(n) and _bases(order[leaf]) & _bases(n):
            order += [n, order.pop(leaf)]
            leaf = None
            continue
        leaf = None if needed or is_random(n) else len(order)
        order.append(n)
    return order


def _is_needed(node: Node, work: set[Node]) -> bool:
    return any(u in work for u in users_through_views(node))


def _bases(node: Node) -> set[Node]:
    """Return the values that a node's arguments are, or are views of."""
    found = set()
    for a in node.all_input_nodes:
        while is_view(a):
            a = a.all_input_nodes[0]
        found.add(a)
    return found
