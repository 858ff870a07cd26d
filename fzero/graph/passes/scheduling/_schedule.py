"""schedule: order the nodes of a graph so that few bytes are live at any time.

This is list scheduling: nodes are appended to a list one by one, each after the nodes that it needs.

1. Give each node a role (`roles`). *Work* is a matrix product, a convolution or the like, and all nodes that feed one.
   A *late* node depends on inputs alone, so it can wait until it is needed: the gather of a parameter, a cast, a
   constant. A cast that `recast` repeats is late too. An *early* node feeds no work: the reduction of a gradient, an
   update, a write-back.
2. List the work in its traced order, but put the gradient of a weight after that of an activation (`_listing.py`).
3. Insert the late nodes that a node of work needs right before it (`list_nodes`).
4. Run an early node as soon as the nodes that it needs have run, depth first, so that one unit's gradients are freed
   before the next unit's are computed. It waits until the next work is about to take memory, since cheap work may free
   a gathered unit first. A write into an argument counts as early, and needs all readers of the argument.
5. Postpone the wait for an early collective while no more than `in_flight` are in flight. Each holds its operand.
6. To start gathers ahead, find in this list where each may start (`next_gathers`, `fit_prefetches`), and list again.
7. Put the host's computations after all the device's work (`_move_host_last`).
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node

from fzero._torch import copy_nodes
from fzero.graph.ir import COPY, TO_HOST, Storages, input_only_nodes, is_view, on_host, parameter_gathers, storages
from fzero.graph.passes.scheduling._listing import OrderRules, list_nodes, order_rules, readers_of_overwritten
from fzero.graph.passes.scheduling._prefetches import fit_prefetches, next_gathers
from fzero.graph.planning import device_live_bytes, find_scalars, record_peak

__all__ = ["Orders", "schedule"]


def _move_host_last(graph: Graph) -> Graph:
    """Move the host's computations, and the nodes that wait for them, to the end of a scheduled graph.

    A segment on the host blocks the thread that launches the device's work, since it holds Python's lock while it runs.
    So the device's queue is filled first, and host and device compute at once. Copies to the host keep their place: a
    gradient is copied as soon as it is computed.

    Args:
        graph: a scheduled graph.

    Returns:
        The same nodes in a valid order; the graph itself if the host computes nothing.
    """
    late = {n for n in on_host(graph.nodes) if _computes(n)}
    if not late:
        return graph
    readers = readers_of_overwritten(graph, storages(graph))
    for n in graph.nodes:  # in order, so that one iteration finds all dependent nodes
        waits = any(a in late for a in (*n.all_input_nodes, *readers.get(n, ())))
        if n.op == "call_function" and waits:
            late.add(n)
    from_inputs = input_only_nodes([n for n in graph.nodes if n.op == "call_function"])
    for n in reversed(graph.nodes):  # a node that only late nodes need, such as a cast of a parameter, is late too
        if n in from_inputs and n.target is not TO_HOST and n.users and all(u in late for u in n.users):
            late.add(n)
    return copy_nodes(sorted(graph.nodes, key=lambda n: _sort_class(n, late)))


def _computes(node: Node) -> bool:
    """Return whether a node computes: it is not a move, a view, or a write of a value just copied to the host."""
    is_upload_write = node.target is COPY and _is_moved(node.args[1])
    return node.op == "call_function" and node.target is not TO_HOST and not is_view(node) and not is_upload_write


def _is_moved(source: object) -> bool:
    while isinstance(source, Node) and is_view(source):
        source = source.all_input_nodes[0]
    return isinstance(source, Node) and source.target is TO_HOST


def _sort_class(node: Node, late: set[Node]) -> int:
    return 2 if node.op == "output" else int(node in late)


@dataclass(frozen=True)
class Orders:
    """The data that the orders of one graph share, each part computed when it is first needed.

    Attributes:
        graph: a flat graph after `donate`.
    """

    graph: Graph
    _lean: dict[int, list[Node]] = field(default_factory=dict, repr=False)
    _live: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def storages(self) -> Storages:
        """The graph's storages."""
        return storages(self.graph)

    @cached_property
    def scalars(self) -> Set[Node]:
        """The graph's scalars, which fused kernels read."""
        return find_scalars(self.graph.nodes)

    @cached_property
    def rules(self) -> OrderRules:
        """The constraints of all orders."""
        return order_rules(self.graph, self.storages)

    @cached_property
    def gathers(self) -> list[Node]:
        """The gathers of parameters."""
        return parameter_gathers(self.graph)

    def lean(self, in_flight: int) -> list[Node]:
        """Return the order in which no gather starts ahead."""
        if in_flight not in self._lean:
            self._lean[in_flight] = list_nodes(self.rules._replace(in_flight=in_flight))
        return self._lean[in_flight]

    @cached_property
    def leanest(self) -> list[Node]:
        """Of the lean order and the graph's own, the one with the lower peak if no collective is in flight."""
        return self.rules.nodes if max(self.graph_live) < max(self.live(0)) else self.lean(0)

    @cached_property
    def graph_live(self) -> list[int]:
        """The live bytes at each position of the graph's own order."""
        return device_live_bytes(self.rules.nodes, self.storages, self.scalars)

    def known_peak(self, order: Sequence[Node]) -> int | None:
        """Return the peak of one of these orders if its live bytes were counted."""
        if order is self.rules.nodes and "graph_live" in self.__dict__:
            return max(self.graph_live)
        return next((max(live) for i, live in self._live.items() if order is self._lean[i]), None)

    def live(self, in_flight: int) -> list[int]:
        """Count the live bytes at each position of the lean order."""
        if in_flight not in self._live:
            self._live[in_flight] = device_live_bytes(self.lean(in_flight), self.storages, self.scalars)
        return self._live[in_flight]


def schedule(
    graph: Graph, prefetch: int = 0, in_flight: int = 0, limit: float = math.inf, orders: Orders | None = None
) -> Graph:
    """Order a graph's nodes so that few bytes are live: stable list scheduling in linear time.

    - Work (matrix products, convolutions and the like, and the nodes that feed them) keeps its order.
    - Nodes that depend on inputs alone (gathers of parameters, casts, an optimizer's decays) run as late as possible.
    - Nodes that no work needs (reductions of gradients, the update, the write-back) run as early as possible.
    - An argument is overwritten after all its readers have run.
    - If no gather starts ahead and no collective is in flight, the graph's own order is kept if its peak is lower.

    Args:
        graph: a flat graph after `donate`.
        prefetch: how many gathers of parameters start ahead of the one that is waited for.
        in_flight: how many other collectives may be in flight while work goes on. Each holds its operand.
        limit: bytes; a gather starts ahead only if no more than this is live from there on.
        orders: the shared data of this graph's orders; computed if None.

    Returns:
        The same nodes in another order. It depends on the arguments alone: ranks with equal graphs and limits agree.
    """
    cache = Orders(graph) if orders is None else orders
    order = cache.lean(in_flight)
    if not prefetch and not in_flight:
        order = cache.leanest
    elif prefetch and cache.gathers:
        ahead = next_gathers(cache.gathers, order, prefetch)
        if limit < math.inf:
            ahead = fit_prefetches(ahead, order, cache.live(in_flight), limit)
        order = list_nodes(cache.rules._replace(in_flight=in_flight, ahead=ahead))
    new_graph = copy_nodes(order)
    result, peak = _move_host_last(new_graph), cache.known_peak(order)
    if result is new_graph and peak is not None:
        record_peak(result, peak)
    return result
