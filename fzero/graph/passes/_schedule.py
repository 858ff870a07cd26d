"""schedule: the order in which a graph runs, so that little is alive at any time.

It is a list scheduling: nodes are put into a list one by one, each after all that it needs. The steps are these.

1. Give each node a role (`_roles`). *Work* is a matrix product, a convolution or the like, and what feeds one. A *late*
   node depends on inputs alone, so it can wait until it is needed: the gather of a parameter, a cast, a constant.
   So can what `recast` made again. An
   *early* node feeds no work: the reduction of a gradient, an update, a write-back.
2. List the work in its traced order, and let a weight's gradient come after the one that goes on backward (`_roles`).
3. Put the late nodes that a piece of work needs right before it (`_listing`).
4. Run an early node as soon as all that it needs has run, depth first, so that one unit's gradients are gone before the
   next one's are born. It runs when the next work is about to take memory, no sooner: cheap work may let a gathered
   unit go first. A write into an argument counts as early, and needs all that read the argument.
5. Put off the wait of an early collective while no more than `in_flight` are on their way. Each holds its operand.
6. If gathers are to start ahead, find from that list where each may start (`_ahead`), and list once more.
7. What the host computes comes behind all that the device does (`_host_last`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node

from fzero.graph._ir import COPY, is_collective, is_wait, nbytes, parameter_gathers, reordered, values, values_of_args
from fzero.graph._ops import is_view
from fzero.graph._storages import DOWN, Storages, on_host, storages
from fzero.graph.loop._rank_schedule import BEGINS
from fzero.graph.passes._listing import OrderRules, listed, made_of_inputs, readers_of_overwritten, rules_of
from fzero.graph.planning._liveness import live_in

__all__ = ["Orders", "asked_ahead", "host_last", "schedule", "where_it_fits"]

# Ahead: where gathers of parameters start before they are needed.


def asked_ahead(gathers: Sequence[Node], order: Sequence[Node], prefetch: int) -> dict[Node, list[Node]]:
    """Map the first use of each gather, its wait, to those that start before it: of one pass, if it is a pipeline's.

    The passes stand in the order of the stages. A later stage's forward pass runs before an earlier one's backward.
    """
    chosen, passes = set(gathers), list[list[Node]]([[]])
    for n in order:
        if n.target is BEGINS:
            passes.append([])
        elif n in chosen:
            passes[-1].append(n)
    return {
        min(g.users, key=str, default=g): mine[i + 1 : i + 1 + prefetch] for mine in passes for i, g in enumerate(mine)
    }


def where_it_fits(
    ahead: Mapping[Node, Sequence[Node]], order: Sequence[Node], live: Sequence[int], limit: float
) -> dict[Node, list[Node]]:
    """Let each gather that would start ahead do so as early as there is room for it from then on.

    It starts beside another collective, not between operations that would be compiled as one.

    Args:
        ahead: for some nodes, the gathers that may start as early as right before them.
        order: all nodes; no gather starts ahead in it.
        live: the bytes alive at each position of `order`.
        limit: how many bytes may be alive where a gather is on its way.

    Returns:
        For some nodes, the gathers that start right before them.
    """
    position = {n: i for i, n in enumerate(order)}
    live, found = list(live), {}
    first: dict[Node, int] = {}  # each gather, and from where on it may start
    for before, gathers in ahead.items():
        for g in gathers:
            first.setdefault(g, position[before])
    for g, earliest in first.items():
        size, until = nbytes(*values(g), *values_of_args(g)), _begins(g, order, position)
        start = until
        while start > earliest and live[start - 1] + size <= limit:
            start -= 1
        start = next((i for i in range(start, until) if _meets(order[i - 1]) or _meets(order[i])), until)
        if start < until:
            live[start:until] = [x + size for x in live[start:until]]
            found.setdefault(order[start], []).append(g)
    return found


def _meets(node: Node) -> bool:
    return is_wait(node) or is_collective(node)


def _begins(gather: Node, order: Sequence[Node], position: Mapping[Node, int]) -> int:
    """Return where the operations begin that lead up to a gather: they pack its operand."""
    at, needed = position[gather], {gather}
    while order[at] in needed:
        needed.update(order[at].all_input_nodes)
        at -= 1
    return at + 1


# host_last: all of the device's work is started before the host computes.


def host_last(graph: Graph) -> Graph:
    """Put what the host computes, and what waits for it, behind all else of a scheduled graph.

    A segment on the host holds up the thread that launches the device's work (it holds Python's lock while it runs). So
    the device's queue is filled first, and both compute at once. Copies to the host stay where the schedule has them: a
    gradient goes down as soon as it is there.

    Args:
        graph: a scheduled graph.

    Returns:
        The same nodes in an order in which each follows what it needs; the graph itself if nothing lies on the host.
    """
    late = {n for n in on_host(graph.nodes) if _computes(n)}
    if not late:
        return graph
    readers = readers_of_overwritten(graph, storages(graph))
    for n in graph.nodes:  # in order, so that one pass finds all that follow
        waits = any(a in late for a in (*n.all_input_nodes, *readers.get(n, ())))
        if n.op == "call_function" and waits:
            late.add(n)
    made = made_of_inputs([n for n in graph.nodes if n.op == "call_function"])
    for n in reversed(graph.nodes):  # what only they need, such as a cast of a parameter, is made for them
        if n in made and n.target is not DOWN and n.users and all(u in late for u in n.users):
            late.add(n)
    return reordered(graph, sorted(graph.nodes, key=lambda n: _place(n, late)))


def _computes(node: Node) -> bool:
    """Return whether a node is work, and not only a move, a view, or a write of what has just come down."""
    written = node.target is COPY and _moved(node.args[1])
    return node.op == "call_function" and node.target is not DOWN and not is_view(node) and not written


def _moved(source: object) -> bool:
    while isinstance(source, Node) and is_view(source):
        source = source.all_input_nodes[0]
    return isinstance(source, Node) and source.target is DOWN


def _place(node: Node, late: set[Node]) -> int:
    return 2 if node.op == "output" else int(node in late)


@dataclass(frozen=True)
class Orders:
    """What the orders of one graph have in common, each part of it found when it is first needed.

    Attributes:
        graph: a flat graph, donation done.
    """

    graph: Graph
    _lean: dict[int, list[Node]] = field(default_factory=dict, repr=False)
    _live: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def storages(self) -> Storages:
        """The graph's storages."""
        return storages(self.graph)

    @cached_property
    def rules(self) -> OrderRules:
        """What all orders obey."""
        return rules_of(self.graph, self.storages)

    @cached_property
    def gathers(self) -> list[Node]:
        """The gathers of parameters."""
        return parameter_gathers(self.graph)

    def lean(self, in_flight: int) -> list[Node]:
        """Return the order in which no gather starts ahead."""
        if in_flight not in self._lean:
            self._lean[in_flight] = listed(self.rules._replace(in_flight=in_flight))
        return self._lean[in_flight]

    @cached_property
    def leanest(self) -> list[Node]:
        """The order that holds least, of the lean one and that of the graph, if no collective is on its way."""
        given = self.rules.nodes
        return given if max(live_in(given, self.storages)) < max(self.live(0)) else self.lean(0)

    def live(self, in_flight: int) -> list[int]:
        """Count the bytes alive at each place of that order."""
        if in_flight not in self._live:
            self._live[in_flight] = live_in(self.lean(in_flight), self.storages)
        return self._live[in_flight]


def schedule(
    graph: Graph, prefetch: int = 0, in_flight: int = 0, limit: float = math.inf, orders: Orders | None = None
) -> Graph:
    """Put a graph's nodes in an order that keeps little alive; a stable list scheduling in linear time.

    - Work (whatever a matrix product, a convolution or the like depends on) keeps its order.
    - What depends only on inputs (gathers of parameters, casts, an optimizer's decays) runs as late as it can.
    - What no work depends on (reductions of gradients, the update, the write-back) runs as soon as it can.
    - An argument is overwritten when all that read it have run.
    - Where nothing starts ahead and nothing is on its way, the graph's own order stays if it holds less.

    Args:
        graph: a flat graph, donation done.
        prefetch: how many gathers of parameters start ahead of the one that is waited for.
        in_flight: how many other collectives may be on their way while work goes on. Each holds its operand.
        limit: bytes; a gather starts ahead only as far as no more than this is alive from there on.
        orders: of this graph, for the schedules of one graph to share.

    Returns:
        The same nodes in another order, that depends on the arguments alone: ranks with the same graph and limit agree.
    """
    found = Orders(graph) if orders is None else orders
    order = found.lean(in_flight)
    if not prefetch and not in_flight:
        order = found.leanest
    elif prefetch and found.gathers:
        ahead = asked_ahead(found.gathers, order, prefetch)
        if limit < math.inf:
            ahead = where_it_fits(ahead, order, found.live(in_flight), limit)
        order = listed(found.rules._replace(in_flight=in_flight, ahead=ahead))
    return host_last(reordered(graph, order))
