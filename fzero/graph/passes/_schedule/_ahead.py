"""Ahead: where gathers of parameters start before they are needed."""

from collections.abc import Mapping, Sequence

from torch.fx import Node

from fzero.graph.ir import is_collective, is_wait, nbytes, values, values_of_args
from fzero.graph.phases import BEGINS

__all__ = ["asked_ahead", "where_it_fits"]


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
