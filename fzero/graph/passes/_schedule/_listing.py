"""Listing: the nodes of a graph one by one, by their roles and what they wait for."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph.ir import COPY, after_needs, is_cheap, is_gather, is_input, is_wait, is_write, start_of
from fzero.graph.ops import is_view
from fzero.graph.passes._schedule._roles import Roles, roles, work_in_order
from fzero.graph.storages import Storages

__all__ = ["OrderRules", "listed", "readers_of_overwritten", "rules_of"]


class OrderRules(NamedTuple):
    """What an order obeys.

    Attributes:
        nodes: of the graph, in the old order.
        index: the place of each in it.
        roles: when each runs.
        work: the nodes that are work, in the order in which they run.
        readers: for each write into an argument, the nodes that read the argument before.
        writes: for each of those readers, the writes that wait for it.
        in_flight: how many collectives, other than those ahead, may be on their way while work goes on.
        ahead: for some nodes, the gathers that start right before them.
    """

    nodes: list[Node]
    index: dict[Node, int]
    roles: Roles
    work: list[Node]
    readers: dict[Node, list[Node]]
    writes: dict[Node, list[Node]]
    in_flight: int
    ahead: Mapping[Node, Sequence[Node]]

    def holds_up(self, node: Node) -> bool:
        """Return whether early nodes wait for this one: inputs are there, and late nodes come when they are needed."""
        return not is_input(node) and node not in self.roles.late


@dataclass
class Listing:
    """How far an order is made.

    Attributes:
        missing: for each early node and each write, of how many nodes it waits for the run.
        order: the nodes so far.
        done: the same as a set.
        ready: a stack of nodes that can run; the last runs first.
        on_the_way: the waits that are put off, of the oldest collective first.
        put_off: all waits that ever were put off: each is once.
    """

    missing: dict[Node, int]
    order: list[Node] = field(default_factory=list)
    done: set[Node] = field(default_factory=set)
    ready: list[Node] = field(default_factory=list)
    on_the_way: deque[Node] = field(default_factory=deque)
    put_off: set[Node] = field(default_factory=set)


def rules_of(graph: Graph, lent: Storages) -> OrderRules:
    """Find what an order of a graph obeys, if no gather starts ahead and no collective is on its way beside work."""
    nodes, readers = list(graph.nodes), readers_of_overwritten(graph, lent)
    index = {n: i for i, n in enumerate(nodes)}
    if any(index[reader] > index[write] for write, before in readers.items() for reader in before):
        nodes = after_needs(nodes, readers)
        index = {n: i for i, n in enumerate(nodes)}
    writes: dict[Node, list[Node]] = {}
    for write, before in readers.items():
        for reader in before:
            writes.setdefault(reader, []).append(write)
    parts = roles(graph)
    return OrderRules(nodes, index, parts, work_in_order(parts.work), readers, writes, 0, {})


def listed(rules: OrderRules) -> list[Node]:
    """List a graph's nodes in the order in which they run."""
    state = Listing(_missing(rules))
    for n in rules.nodes:
        if is_input(n):
            _append(rules, state, n)
    for n in rules.work:
        needed = _unmet(rules, state, n)
        # what is ready waits until memory is about to be taken: a unit's last cheap work may let its gather go
        if any(not is_cheap(a) or is_gather(a) for a in needed):
            _run_ready(rules, state)
        _require(rules, state, needed)
    _run_ready(rules, state)
    while state.on_the_way:
        _require(rules, state, _unmet(rules, state, state.on_the_way.popleft()))
        _run_ready(rules, state)
    # result by result: without work in between, an update of all leaves at once would hold what each needs
    for n in [*rules.nodes[-1].all_input_nodes, *rules.nodes]:
        for needed in _unmet(rules, state, n):
            _require(rules, state, _unmet(rules, state, needed))
            _run_ready(rules, state)
    return state.order


def _missing(rules: OrderRules) -> dict[Node, int]:
    """Count for each early node, and each write, the nodes that it waits for."""
    missing = {n: sum(rules.holds_up(a) for a in n.all_input_nodes) for n in rules.roles.early}
    for write, readers in rules.readers.items():
        missing[write] = missing.get(write, 0) + len(readers)
    return missing


def _require(rules: OrderRules, state: Listing, needed: Sequence[Node]) -> None:
    """Run nodes in this order; of those that become ready the first is to run first."""
    for n in needed:
        state.ready = _emit(rules, state, n) + state.ready


def _run_ready(rules: OrderRules, state: Listing) -> None:
    """Run all nodes that can run, and those that can because of that, depth first."""
    stack, state.ready = state.ready, []
    while stack:
        n = stack.pop()
        if n in state.done:
            continue
        if rules.in_flight and is_wait(n) and n not in state.put_off:
            state.put_off.add(n)
            state.on_the_way.append(n)
            stack += _landing(rules, state)
            continue
        for needed in _unmet(rules, state, n):  # it and the late ones that it needs
            stack += _emit(rules, state, needed)


def _landing(rules: OrderRules, state: Listing) -> list[Node]:
    """Take back the waits of the oldest collective, as a stack, if one too many is on its way."""
    starts = list(dict.fromkeys(map(start_of, state.on_the_way)))
    landing = [w for w in state.on_the_way if start_of(w) is starts[0]] if len(starts) > rules.in_flight else []
    state.on_the_way = deque(w for w in state.on_the_way if w not in landing)
    return landing[::-1]


def _unmet(rules: OrderRules, state: Listing, node: Node) -> list[Node]:
    """List a node and the nodes that it needs and that have not run, in an order that can run."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in state.done and n not in found:
            found[n] = None
            stack += n.all_input_nodes
            stack += rules.readers.get(n, ())
    return sorted(found, key=rules.index.__getitem__)


def _emit(rules: OrderRules, state: Listing, node: Node) -> list[Node]:
    """Put the gathers that start ahead of a node next in the order, and then the node.

    Returns:
        The nodes that can run because of it, as a stack.
    """
    released = []
    for gather in rules.ahead.get(node, ()):
        for n in _unmet(rules, state, gather):
            released += _append(rules, state, n)
    return released + _append(rules, state, node)


def _append(rules: OrderRules, state: Listing, node: Node) -> list[Node]:
    """Put a node next in the order, and return the nodes that can run because of it, as a stack."""
    if node in state.done:
        return []
    state.done.add(node)
    state.order.append(node)
    waiting = [user for user in node.users if user in rules.roles.early] if rules.holds_up(node) else []
    ready = []
    for n in [*waiting, *rules.writes.get(node, ())]:
        state.missing[n] -= 1
        if not state.missing[n]:
            ready.append(n)
    ready += [] if waiting or is_input(node) else _met(rules, state, node)
    # the first to run comes last: a write, which ends its source, before what goes on
    return sorted(ready, key=lambda n: (n.target is not COPY, rules.index[n]), reverse=True)


def _met(rules: OrderRules, state: Listing, node: Node) -> list[Node]:
    """List the early nodes that waited for late ones alone, of which this was the last: they end its life."""
    found = [u for u in node.users if u in rules.roles.early and u not in state.done and not state.missing[u]]
    return [u for u in found if all(a in state.done for a in u.all_input_nodes)]


def readers_of_overwritten(graph: Graph, lent: Storages) -> dict[Node, list[Node]]:
    """Map each write into an argument to all other nodes that read the argument."""
    writes = [n for n in graph.nodes if is_write(n)]
    if not writes:
        return {}
    writers: dict[int, list[Node]] = {}
    for w in writes:
        for s in dict.fromkeys(lent.of[w]):
            writers.setdefault(s, []).append(w)
    found: dict[Node, dict[Node, None]] = {w: {} for w in writes}
    for n in graph.nodes:
        if n.op == "output" or is_view(n):
            continue
        # a collective reads its operand until it is waited for
        read = lent.read_by(n) + (lent.read_by(start_of(n)) if is_wait(n) else [])
        for s in dict.fromkeys(read):
            theirs = writers.get(s, ())  # of which one may be given another's result
            if n not in theirs and not (is_wait(n) and start_of(n) in theirs):
                for w in theirs:
                    found[w][n] = None
    return {w: list(readers) for w, readers in found.items()}
