"""schedule: the order in which a graph runs, so that little is alive at any time."""

import math
from collections import deque
from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from fzero.graph.ir import (
    COPY,
    feeding_work,
    is_cheap,
    is_collective,
    is_gather,
    is_input,
    is_reduction,
    is_wait,
    is_write,
    nbytes,
    reordered,
    start_of,
    storages,
    users_through_views,
    values,
    values_of_args,
)
from fzero.graph.ops import is_factory, is_random, is_view
from fzero.graph.passes._regather import parameter_gathers
from fzero.graph.plan._liveness import live_bytes, live_ranges

__all__ = ["schedule"]


def schedule(graph: Graph, prefetch: int = 0, in_flight: int = 0, limit: float = math.inf) -> Graph:
    """Put a graph's nodes in an order that keeps little alive; a stable list scheduling in linear time.

    - Work (whatever a matrix product, a convolution or the like depends on) keeps its order.
    - What depends only on inputs (gathers of parameters, casts, an optimizer's decays) runs as late as it can.
    - What no work depends on (reductions of gradients, the update, the write-back) runs as soon as it can, depth
      first, so that one unit's gradients are gone before the next one's are born.
    - An argument is overwritten when all that read it have run.

    Args:
        graph: a flat graph, donation done.
        prefetch: how many gathers of parameters start ahead of the one that is waited for.
        in_flight: how many other collectives may be on their way while work goes on. Each holds its operand.
        limit: bytes; a gather starts ahead only as far as no more than this is alive from there on.

    Returns:
        The same nodes in another order, that depends on the arguments alone: ranks with the same graph and limit agree.
    """
    late, early = _late_and_early(graph)
    gathers = parameter_gathers(graph)
    order = _Scheduler(graph, late, early, {}, in_flight).run()
    if prefetch and gathers:
        position = {n: i for i, n in enumerate(order)}
        ahead = _ahead(sorted(gathers, key=position.__getitem__), prefetch)
        if limit < math.inf:
            in_order = reordered(graph, order)
            live = live_bytes(live_ranges(in_order), len(in_order.nodes))
            ahead = _where_it_fits(ahead, order, live, limit)
        order = _Scheduler(graph, late, early, ahead, in_flight).run()
    return reordered(graph, order)


def _late_and_early(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Sort nodes into those that depend on inputs only, those that no work needs; all others are work."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    from_inputs: set[Node] = set()
    for n in nodes:
        movable = is_cheap(n) and not is_reduction(n) and not is_write(n)
        if movable and all(is_input(a) or a in from_inputs for a in n.all_input_nodes):
            from_inputs.add(n)
    feeds_work = feeding_work(graph)
    late: set[Node] = set()
    for n in reversed(nodes):
        if n in from_inputs:
            moves = is_view(n) or is_gather(n) or is_wait(n) or is_factory(n)
            if moves or n not in feeds_work or all(u in late for u in n.users):
                late.add(n)
    early = {n for n in nodes if n not in feeds_work and n not in late}
    for n in reversed(nodes):  # a reduction, and what packs its operand, though work may need the result
        if n not in late and is_cheap(n) and not is_write(n):
            waits = is_wait(n) and is_reduction(start_of(n))
            if waits or is_reduction(n) or (n.users and all(u in early for u in n.users)):
                early.add(n)
    return late, early


class _Scheduler:
    """Emits the nodes of one graph in their new order."""

    def __init__(
        self,
        graph: Graph,
        late: set[Node],
        early: set[Node],
        ahead: Mapping[Node, Iterable[Node]],
        in_flight: int,
    ) -> None:
        self.nodes = list(graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.late, self.early = late, early
        self.readers = _readers_of_overwritten(graph)
        self.in_flight = in_flight
        self.ahead = ahead  # node -> gathers that start before it
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.ready: list[Node] = []  # a stack of early nodes that can run
        self.pending: deque[Node] = deque()  # waits of collectives that are on their way
        self.deferred: set[Node] = set()  # all that ever were
        self.missing = {n: sum(self._holds_up(a) for a in n.all_input_nodes) for n in early}
        self.blocked: dict[Node, list[Node]] = {}  # node -> the writes that its reading holds up
        for write, readers in self.readers.items():
            for reader in readers:
                self.blocked.setdefault(reader, []).append(write)
            self.missing[write] = self.missing.get(write, 0) + len(readers)

    def _holds_up(self, node: Node) -> bool:
        return not is_input(node) and node not in self.late

    def run(self) -> list[Node]:
        for n in self.nodes:
            if is_input(n):
                self._append(n)
        work = [n for n in self.nodes if n.op == "call_function" and n not in self.late and n not in self.early]
        for n in _leaves_second(work):
            needed = self._unmet(n)
            # what is ready waits until memory is about to be taken: a unit's last cheap work may let its gather go
            if any(not is_cheap(a) or is_gather(a) for a in needed):
                self._drain()
            self._require(needed)
        self._drain()
        while self.pending:
            self._require(self._unmet(self.pending.popleft()))
            self._drain()
        for n in self.nodes:
            self._require(self._unmet(n))
            self._drain()
        return self.order

    def _require(self, needed: list[Node]) -> None:
        for n in needed:
            self.ready = self._emit(n) + self.ready  # the first to be ready runs first

    def _drain(self) -> None:
        """Emit what can run and what can run because of that, depth first."""
        stack, self.ready = self.ready, []
        while stack:
            n = stack.pop()
            if n in self.done:
                continue
            if self._defer(n):
                stack += self._landing()
                continue
            for needed in self._unmet(n):  # it and the late ones that it needs
                stack += self._emit(needed)

    def _unmet(self, node: Node) -> list[Node]:
        """List a node and what it needs that has not run, in an order that can run."""
        found: dict[Node, None] = {}
        stack = [node]
        while stack:
            n = stack.pop()
            if n not in self.done and n not in found:
                found[n] = None
                stack += n.all_input_nodes
                stack += self.readers.get(n, ())
        return sorted(found, key=self.index.__getitem__)

    def _defer(self, wait: Node) -> bool:
        """Keep back, once, the wait of a collective that may be on its way for some time."""
        if not self.in_flight or not is_wait(wait) or wait in self.deferred:
            return False
        self.deferred.add(wait)
        self.pending.append(wait)
        return True

    def _landing(self) -> list[Node]:
        """Take back the waits of the oldest collective, if one too many is on its way."""
        starts = list(dict.fromkeys(map(start_of, self.pending)))
        landing = [w for w in self.pending if start_of(w) is starts[0]] if len(starts) > self.in_flight else []
        self.pending = deque(w for w in self.pending if w not in landing)
        return landing[::-1]

    def _emit(self, node: Node) -> list[Node]:
        """Put a node next in the order; returns what can run because of it, the first to run last (a stack)."""
        released = []
        for gather in self.ahead.get(node, ()):
            for n in self._unmet(gather):
                released += self._append(n)
        return released + self._append(node)

    def _append(self, node: Node) -> list[Node]:
        if node in self.done:
            return []
        self.done.add(node)
        self.order.append(node)
        ready = []
        for user in node.users if self._holds_up(node) else ():
            if user in self.early:
                self.missing[user] -= 1
                ready += [] if self.missing[user] else [user]
        for write in self.blocked.get(node, ()):
            self.missing[write] -= 1
            ready += [] if self.missing[write] else [write]
        # the first to run comes last: a write, which ends its source, before what goes on
        return sorted(ready, key=lambda n: (n.target is not COPY, self.index[n]), reverse=True)


def _leaves_second(work: list[Node]) -> list[Node]:
    """Let the gradient that goes on backward come before the one of a weight, which nothing waits for.

    Autograd computes them in the other order, and what the former needs, such as a gather, would find the latter alive.
    """
    among = set(work)
    order: list[Node] = []
    held: tuple[int, Node] | None = None  # the last leaf, and its place
    for n in work:
        if held is not None and not is_cheap(n):
            at, leaf = held
            shared = _bases(leaf) & _bases(n) and _is_needed(n, among) and not is_random(n)
            order.insert(len(order) if shared else at, leaf)
            held = None
            if shared:
                order.insert(len(order) - 1, n)
                continue
        if is_cheap(n) or is_random(n) or _is_needed(n, among):
            order.append(n)
        else:
            held = (len(order), n)
    return order if held is None else [*order[: held[0]], held[1], *order[held[0] :]]


def _is_needed(node: Node, work: set[Node]) -> bool:
    return any(u in work for u in users_through_views(node))


def _bases(node: Node) -> set[Node]:
    """Return what a node's arguments are views of."""
    found = set()
    for a in node.all_input_nodes:
        while is_view(a):
            a = a.all_input_nodes[0]
        found.add(a)
    return found


def _ahead(gathers: list[Node], prefetch: int) -> dict[Node, list[Node]]:
    """Map the first use of each gather, its wait, to those that start before it."""
    return {min(g.users, key=str, default=g): gathers[i + 1 : i + 1 + prefetch] for i, g in enumerate(gathers)}


def _where_it_fits(
    ahead: dict[Node, list[Node]], order: list[Node], live: list[int], limit: float
) -> dict[Node, list[Node]]:
    """Let each gather that would start ahead do so as early as there is room for it from then on.

    Beside another collective, not between operations that would be compiled as one. `live` are the bytes alive at each
    position of `order`, in which none starts ahead.
    """
    position = {n: i for i, n in enumerate(order)}
    live, found, seen = live[:], {}, set()
    for before, gathers in ahead.items():
        for g in gathers:
            if g in seen:
                continue
            seen.add(g)
            size, until = nbytes(*values(g), *values_of_args(g)), _begins(g, order, position)
            start = until
            while start > position[before] and live[start - 1] + size <= limit:
                start -= 1
            start = next((i for i in range(start, until) if _meets(order[i - 1]) or _meets(order[i])), until)
            if start < until:
                live[start:until] = [x + size for x in live[start:until]]
                found.setdefault(order[start], []).append(g)
    return found


def _meets(node: Node) -> bool:
    return is_wait(node) or is_collective(node)


def _begins(gather: Node, order: list[Node], position: dict[Node, int]) -> int:
    """Return where the operations begin that lead up to a gather: they pack its operand."""
    at, needed = position[gather], {gather}
    while order[at] in needed:
        needed.update(order[at].all_input_nodes)
        at -= 1
    return at + 1


def _readers_of_overwritten(graph: Graph) -> dict[Node, list[Node]]:
    """Map each write into an argument to all other nodes that read the argument."""
    writes = [n for n in graph.nodes if is_write(n)]
    if not writes:
        return {}
    lent = storages(graph)
    writer = {s: w for w in writes for s in lent.of[w]}
    found: dict[Node, dict[Node, None]] = {w: {} for w in writes}
    for n in graph.nodes:
        if n.op == "output" or is_view(n):
            continue
        # a collective reads its operand until it is waited for
        read = lent.read_by(n) + (lent.read_by(start_of(n)) if is_wait(n) else [])
        for s in dict.fromkeys(read):
            if s in writer and writer[s] is not n and not (is_wait(n) and writer[s] is start_of(n)):
                found[writer[s]][n] = None
    return {w: list(readers) for w, readers in found.items()}
