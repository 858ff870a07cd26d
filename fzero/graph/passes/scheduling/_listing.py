"""List scheduling of a graph: the roles of its nodes, the rules of an order, and the order that they give."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import (
    COPY,
    Storages,
    is_cheap,
    is_gather,
    is_input,
    is_view,
    is_wait,
    is_write,
    sort_by_needs,
    wait_start,
)
from fzero.graph.passes.scheduling._node_roles import NodeRoles, node_roles, work_in_order

__all__ = ["OrderRules", "list_nodes", "order_rules", "readers_of_overwritten"]


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
    roles: NodeRoles
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
    parts = node_roles(graph)
    return OrderRules(
        nodes=nodes,
        index=index,
        roles=parts,
        work=work_in_order(parts.work),
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
            _append_node(rules, state, n)
    for n in rules.work:
        needs = _unmet_needs(rules, state, n)
        # ready nodes wait until the next node that takes memory: cheap work before it may free a gathered unit
        if any(not is_cheap(a) or is_gather(a) for a in needs):
            _run_ready(rules, state)
        _run_nodes(rules, state, needs)
    _run_ready(rules, state)
    while state.pending:
        _run_nodes(rules, state, _unmet_needs(rules, state, state.pending.popleft()))
        _run_ready(rules, state)
    # one result at a time: an update of all leaves at once would hold the operands of every leaf
    for n in [*rules.nodes[-1].all_input_nodes, *rules.nodes]:
        for needs in _unmet_needs(rules, state, n):
            _run_nodes(rules, state, _unmet_needs(rules, state, needs))
            _run_ready(rules, state)
    return state.order


def _count_missing(rules: OrderRules) -> dict[Node, int]:
    """Count for each early node and each write the nodes that it waits for."""
    missing = {n: sum(rules.holds_up(a) for a in n.all_input_nodes) for n in rules.roles.early}
    for write, readers in rules.readers.items():
        missing[write] = missing.get(write, 0) + len(readers)
    return missing


def _run_nodes(rules: OrderRules, state: _ListSchedulerState, nodes: Sequence[Node]) -> None:
    """Run nodes in this order, and stack the nodes that become ready, so that the first of them runs first."""
    for n in nodes:
        state.ready = _emit_with_gathers(rules, state, n) + state.ready


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
        for needs in _unmet_needs(rules, state, n):  # the node and the late nodes that it needs
            stack += _emit_with_gathers(rules, state, needs)


def _due_waits(rules: OrderRules, state: _ListSchedulerState) -> list[Node]:
    """Return the waits of the oldest collective, as a stack, if more than `in_flight` collectives are in flight."""
    starts = list(dict.fromkeys(map(wait_start, state.pending)))
    due = [w for w in state.pending if wait_start(w) is starts[0]] if len(starts) > rules.in_flight else []
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


def _emit_with_gathers(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
    """Append the gathers that start ahead of a node to the order, and then the node.

    Returns:
        The nodes that become ready, as a stack.
    """
    ready_nodes = []
    for gather in rules.ahead.get(node, ()):
        for n in _unmet_needs(rules, state, gather):
            ready_nodes += _append_node(rules, state, n)
    return ready_nodes + _append_node(rules, state, node)


def _append_node(rules: OrderRules, state: _ListSchedulerState, node: Node) -> list[Node]:
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
    if not waiting and not is_input(node):
        ready += _ready_after(rules, state, node)
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
        read_storages = memory.read_by(n) + (memory.read_by(wait_start(n)) if is_wait(n) else [])
        for s in dict.fromkeys(read_storages):
            storage_writers = writers.get(s, ())  # one of them may read another's result
            if n not in storage_writers and not (is_wait(n) and wait_start(n) in storage_writers):
                for w in storage_writers:
                    readers_of[w][n] = None
    return {w: list(readers) for w, readers in readers_of.items()}
