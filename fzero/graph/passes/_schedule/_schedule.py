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
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node

from fzero.graph.ir import parameter_gathers, reordered
from fzero.graph.passes._schedule._ahead import asked_ahead, where_it_fits
from fzero.graph.passes._schedule._host_last import host_last
from fzero.graph.passes._schedule._listing import OrderRules, listed, rules_of
from fzero.graph.plan._liveness import live_in
from fzero.graph.storages import Storages, storages

__all__ = ["Orders", "schedule"]


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
    if prefetch and found.gathers:
        ahead = asked_ahead(found.gathers, order, prefetch)
        if limit < math.inf:
            ahead = where_it_fits(ahead, order, found.live(in_flight), limit)
        order = listed(found.rules._replace(in_flight=in_flight, ahead=ahead))
    return host_last(reordered(graph, order))
