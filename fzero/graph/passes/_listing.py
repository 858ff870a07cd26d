"""The nodes of a graph for the scheduler: their roles, and what each waits for."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._ir import (
    COPY,
    LATE,
    after_needs,
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
from fzero.graph._ops import is_factory, is_random, is_view
from fzero.graph._storages import Storages
from fzero.graph.loop._rank_schedule import is_marker

__all__ = [
    "OrderRules",
    "Roles",
    "listed",
    "made_of_inputs",
    "readers_of_overwritten",
    "roles",
    "rules_of",
    "work_in_order",
]


# Roles: which nodes of a graph are work, and which of the others run late or early.


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


# Listing: the nodes of a graph one by one, by their roles and what they wait for.


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
