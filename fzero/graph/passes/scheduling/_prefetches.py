"""Where gathers of parameters start before they are needed."""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fzero.graph.ir import argument_stand_ins, is_collective, is_wait, nbytes, node_stand_ins
from fzero.graph.loop import BEGIN_REGION

__all__ = ["fit_prefetches", "next_gathers"]


def next_gathers(gathers: Sequence[Node], order: Sequence[Node], prefetch: int) -> dict[Node, list[Node]]:
    """Map the wait of each gather to the next `prefetch` gathers, which start before it.

    In a pipeline, only gathers of the same region start ahead. The graph lists the regions in the order of the stages,
    but a later stage's forward pass runs before an earlier stage's backward pass.
    """
    gather_set, regions = set(gathers), list[list[Node]]([[]])
    for n in order:
        if n.target is BEGIN_REGION:
            regions.append([])
        elif n in gather_set:
            regions[-1].append(n)
    return {
        min(g.users, key=str, default=g): region_gathers[i + 1 : i + 1 + prefetch]
        for region_gathers in regions
        for i, g in enumerate(region_gathers)
    }


def fit_prefetches(
    ahead: Mapping[Node, Sequence[Node]], order: Sequence[Node], live: Sequence[int], limit: float
) -> dict[Node, list[Node]]:
    """Start each gather of `ahead` as early as its bytes fit below the limit from there on.

    A gather starts next to another collective, so that it splits no segment of compiled operations.

    Args:
        ahead: for some nodes, the gathers that may start right before them at the earliest.
        order: all nodes, in an order without prefetch.
        live: the live bytes at each position of `order`.
        limit: how many bytes may be live while a gather is in flight.

    Returns:
        For some nodes, the gathers that start right before them.
    """
    position = {n: i for i, n in enumerate(order)}
    live = list(live)
    gathers_before: dict[Node, list[Node]] = {}
    earliest_starts: dict[Node, int] = {}  # the earliest position at which each gather may start
    for before, gathers in ahead.items():
        for g in gathers:
            earliest_starts.setdefault(g, position[before])
    for g, earliest in earliest_starts.items():
        size, until = nbytes(*node_stand_ins(g), *argument_stand_ins(g)), _packing_start(g, order, position)
        start = until
        while start > earliest and live[start - 1] + size <= limit:
            start -= 1
        start = next((i for i in range(start, until) if _communicates(order[i - 1]) or _communicates(order[i])), until)
        if start < until:
            live[start:until] = [x + size for x in live[start:until]]
            gathers_before.setdefault(order[start], []).append(g)
    return gathers_before


def _communicates(node: Node) -> bool:
    return is_wait(node) or is_collective(node)


def _packing_start(gather: Node, order: Sequence[Node], position: Mapping[Node, int]) -> int:
    """Return the position of the first operation that packs a gather's operand."""
    start, packing = position[gather], {gather}
    while order[start] in packing:
        packing.update(order[start].all_input_nodes)
        start -= 1
    return start + 1
