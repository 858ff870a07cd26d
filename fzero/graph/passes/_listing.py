"""List scheduling of a graph: the roles of its nodes, the rules of an order, and the order that they give."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    COPY,
    LATE,
    Storages,
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
    sort_by_needs,
    stand_ins_of,
    start_of,
    users_through_views,
)
from fzero.graph.loop._pipeline_marks import is_marker

__all__ = ["OrderRules", "list_nodes", "order_rules", "readers_of_overwritten"]


# Roles: each node of a graph is work, or runs late or early.


class _NodeRoles(NamedTuple):
    """The nodes of a graph, except its inputs and its output, by their role.

    Attributes:
        work: nodes that keep their order.
        late: nodes that depend on inputs alone, or that a pass marked. They run right before their first use.
        early: nodes that no work needs, and reductions. They run as soon as they can.
    """

    work: list[Node]
    late: set[Node]
    early: set[Node]


def _node_roles(graph: Graph) -> _NodeRoles:
    """Give each node of a graph its role."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    feeds_work = feeding_work(graph)
    late = _late_nodes(nodes, feeds_work) | {n for n in nodes if LATE in n.meta and n not in feeds_work}
    late |= _waiting_nodes(nodes, feeds_work, late)
    early = _early_nodes(nodes, feeds_work, late)
    return _NodeRoles([n for n in nodes if n not in late and n not in early], late, early)


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
    before = collectives_before(nodes)
    postponed: set[Node] = set()
    for n in reversed(nodes):
        if n in feeds_work or n in late or not is_cheap(n) or is_wait(n) or is_collective(n) or is_write(n):
            continue
        users = [u for u in n.users if u not in postponed]  # the output has no count, so its operands never wait
        if n.users and all(before.get(u, -1) > before[n] and not is_collective(u) for u in users):
            postponed.add(n)
    return {n for part in _connected_parts(nodes, postponed) if _grows(part, late) for n in part}


def _connected_parts(nodes: Sequence[Node], members: set[Node]) -> list[set[Node]]:
    """Divide nodes into parts that share no values except 0-d ones."""
    part: dict[Node, set[Node]] = {}
    for n in nodes:
        if n in members:
            group = {n}
            for a in n.all_input_nodes:
                if a in part and a not in group and any(x.dim() for x in stand_ins_of(a)):
                    group |= part[a]
            part |= dict.fromkeys(group, group)
    return list({id(x): x for x in part.values()}.values())


def _grows(part: set[Node], late: set[Node]) -> bool:
    """Return whether a part's outputs are larger than its inputs, without arguments and late nodes."""
    inputs = {a for n in part for a in n.all_input_nodes if a not in part and a not in late and not is_input(a)}
    outputs = {n for n in part if any(u not in part for u in n.users)}
    return nbytes(*[x for n in outputs for x in stand_ins_of(n)]) > nbytes(
        *[x for a in inputs for x in stand_ins_of(a)]
    )


def _early_nodes(nodes: Sequence[Node], feeds_work: set[Node], late: set[Node]) -> set[Node]:
    """List the nodes that no work needs, and each reduction with the nodes that pack its operand."""
    early = {n for n in nodes if n not in feeds_work and n not in late}
    for n in reversed(nodes):
        if n not in late and is_cheap(n) and not is_write(n):
            waits = is_wait(n) and is_reduce_collective(start_of(n))
            if waits or is_reduce_collective(n) or (n.users and all(u in early for u in n.users)):
                early.add(n)
    return early


def _work_in_order(work: Sequence[Node]) -> list[Node]:
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
    """Return the values that a node's arguments are or view."""
    bases = set()
    for a in node.all_input_nodes:
        while is_view(a):
            a = a.all_input_nodes[0]
        bases.add(a)
    return bases


# The list scheduler: put the nodes of a graph into a list one by one, by their roles and dependencies.


class OrderRules(NamedTuple):
    """The constraints of an order.

    Attributes:
        nodes: the nodes of the graph, in the old order.
        index: the position of each node in `nodes`.
        roles: the roles of the nodes.
        work: the nodes of work, in the order in which they run.
        readers: for each write into an argument, the nodes that must read the argument first.
        writes: for each reader, the writes that wait for it.
        in_flight: how many collectives, besides those in `ahead`, may be in flight while work goes on.
        ahead: for some nodes, the gathers that start right before them.
    """

    nodes: list[Node]
    index: dict[Node, int]
    roles: _NodeRoles
    work: list[Node]
    readers: dict[Node, list[Node]]
    writes: dict[Node, list[Node]]
    in_flight: int
    ahead: Mapping[Node, Sequence[Node]]

    def holds_up(self, node: Node) -> bool:
        """Return whether early nodes wait for this node. Inputs exist, and late nodes run when they are needed."""
        return not is_input(node) and node not in self.roles.late


@dataclass
class _ListSchedulerState:
    """The state of an order under construction.

    Attributes:
        missing: for each early node and each write, how many nodes it still waits for.
        order: the nodes so far.
        members: the nodes so far, as a set.
        ready: a stack of nodes that can run; the last one runs first.
        pending: the postponed waits, the oldest collective's first.
        postponed: all waits that were ever postponed; each is postponed once.
    """

    missing: dict[Node, int]
    order: list[Node] = field(default_factory=list)
    members: set[Node] = field(default_factory=set)
    ready: list[Node] = field(default_factory=list)
    pending: deque[Node] = field(default_factory=deque)
    postponed: set[Node] = field(default_factory=set)


def order_rules(graph: Graph, memory: Storages) -> OrderRules:
    """Return the constraints of a graph's order without prefetched gathers and without collectives in flight."""
    nodes, readers = list(graph.nodes), readers_of_overwritten(graph, memory)
    index = {n: i for i, n in enumerate(nodes)}
    if any(index[reader] > index[write] for write, before in readers.items() for reader in before):
        nodes = sort_by_needs(nodes, readers)
        index = {n: i for i, n in enumerate(nodes)}
    writes: dict[Node, list[Node]] = {}
    for write, before in readers.items():
        for reader in before:
            writes.setdefault(reader, []).append(write)
    parts = _node_roles(graph)
    return OrderRules(
        nodes=nodes,
        index=index,
        roles=parts,
        work=_work_in_order(parts.work),
        readers=readers,
        writes=writes,
        in_flight=0,
        ahead={},
    )


def list_nodes(rules: OrderRules) -> list[Node]:
    """List a graph's nodes in an order that obeys the rules."""
    state = _ListSchedulerState(_count_missing(rules))
    for n in rules.nodes:
        if is_input(n):
            _append(rules, state, n)
    for n in rules.work:
        needed = _unmet_needs(rules, state, n)
        # ready nodes wait until the next node that takes memory: cheap work before it may free a gathered unit
        if any(not is_cheap(a) or is_gather(a) for a in needed):
            _run_ready(rules, state)
        _require(rules, state, needed)
    _run_ready(rules, state)
    while state.pending:
        _require(rules, state, _unmet_needs(rules, state, state.pending.popleft()))
        _run_ready(rules, state)
    # one result at a time: an update of all leaves at once would hold the operands of every leaf
    for n in [*rules.nodes[-1].all_input_nodes, *rules.nodes]:
        for needed in _unmet_needs(rules, state, n):
            _require(rules, state, _unmet_needs(rules, state, needed))
            _run_ready(rules, state)
    return state.order


def _count_missing(rules: OrderRules) -> dict[Node, int]:
    """Count for each early node and each write the nodes that it waits for."""
    missing = {n: sum(rules.holds_up(a) for a in n.all_input_nodes) for n in rules.roles.early}
    for write, readers in rules.readers.items():
        missing[write] = missing.get(write, 0) + len(readers)
    return missing


def _require(rules: OrderRules, state: _ListSchedulerState, needed: Sequence[Node]) -> None:
    """Run nodes in this order, and stack the nodes that become ready, so that the first of them runs first."""
    for n in needed:
        state.ready = _emit(rules, state, n) + state.ready


def _run_ready(rules: OrderRules, state: _ListSchedulerState) -> None:
    """Run all ready nodes, and the nodes that become ready, depth first."""
    stack, state.ready = state.ready, []
    while stack:
        n = stack.pop()
        if n in state.members:
            continue
        if rules.in_flight and is_wait(n) and n not in state.postponed:
            state.postponed.add(n)
            state.pending.append(n)
            stack += _due_waits(rules, state)
            continue
        for needed in _unmet_needs(rules, state, n):  # the node and the late nodes that it needs
            stack += _emit(rules, state, needed)


def _due_waits(rules: OrderRules, state: _ListSchedulerState) -> list[Node]:
    """Return the waits of the oldest collective, as a stack, if more than `in_flight` collectives are in flight."""
    starts = list(dict.fromkeys(map(start_of, state.pending)))
    due = [w for w in state.pending if start_of(w) is starts[0]] if len(starts) > rules.in_flight else []
    state.pending = deque(w for w in state.pending if w not in due)
    return due[::-1]


def _unmet_needs(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
    """List a node and the nodes that it needs and that have not run, in an order that can run."""
    unmet: dict[Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in state.members and n not in unmet:
            unmet[n] = None
            stack += n.all_input_nodes
            stack += rules.readers.get(n, ())
    return sorted(unmet, key=rules.index.__getitem__)


def _emit(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
    """Append the gathers that start ahead of a node to the order, and then the node.

    Returns:
        The nodes that become ready, as a stack.
    """
    released = []
    for gather in rules.ahead.get(node, ()):
        for n in _unmet_needs(rules, state, gather):
            released += _append(rules, state, n)
    return released + _append(rules, state, node)


def _append(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
    """Append a node to the order, and return the nodes that become ready, as a stack."""
    if node in state.members:
        return []
    state.members.add(node)
    state.order.append(node)
    waiting = [user for user in node.users if user in rules.roles.early] if rules.holds_up(node) else []
    ready = []
    for n in [*waiting, *rules.writes.get(node, ())]:
        state.missing[n] -= 1
        if not state.missing[n]:
            ready.append(n)
    ready += [] if waiting or is_input(node) else _ready_after(rules, state, node)
    # the last runs first: writes before other nodes, since a write frees its source
    return sorted(ready, key=lambda n: (n.target is not COPY, rules.index[n]), reverse=True)


def _ready_after(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
    """List the early nodes whose arguments have all run now that this late node has; they may free its value."""
    candidates = [u for u in node.users if u in rules.roles.early and u not in state.members and not state.missing[u]]
    return [u for u in candidates if all(a in state.members for a in u.all_input_nodes)]


def readers_of_overwritten(graph: Graph, memory: Storages) -> dict[Node, list[Node]]:
    """Map each write into an argument to all other nodes that read the argument."""
    writes = [n for n in graph.nodes if is_write(n)]
    if not writes:
        return {}
    writers: dict[int, list[Node]] = {}
    for w in writes:
        for s in dict.fromkeys(memory.indices[w]):
            writers.setdefault(s, []).append(w)
    readers_of: dict[Node, dict[Node, None]] = {w: {} for w in writes}
    for n in graph.nodes:
        if n.op == "output" or is_view(n):
            continue
        # a collective reads its operand until it is waited for
        read = memory.read_by(n) + (memory.read_by(start_of(n)) if is_wait(n) else [])
        for s in dict.fromkeys(read):
            storage_writers = writers.get(s, ())  # one of them may read another's result
            if n not in storage_writers and not (is_wait(n) and start_of(n) in storage_writers):
                for w in storage_writers:
                    readers_of[w][n] = None
    return {w: list(readers) for w, readers in readers_of.items()}
