"""What a collective moves, as its node tells."""

from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fzero.axes.axis import PLANNED
from fzero.graph.ir import awaited, collective_of, is_gather, is_wait, nbytes, values

__all__ = ["axis_of", "elements", "full_bytes", "group_size", "wire"]


def group_size(node: Node) -> int:
    """Return the number of ranks that a collective tells of; 1 for an all_reduce, which does not tell."""
    if is_gather(node):
        return node.args[1]  # pyright: ignore[reportReturnType]
    sent, received = nbytes(*_operands(node)), nbytes(*values(node))
    return max(sent, received) // max(min(sent, received), 1)


def _operands(node: Node) -> list[torch.Tensor]:
    """List what a collective is given: its first argument, a tensor or several."""
    found: list[torch.Tensor] = []
    map_arg(node.args[0], lambda a: found.extend(values(a)))
    return found


def full_bytes(node: Node) -> int:
    """Count the bytes of a collective's full buffer; given a wait or an item, of what that waits for or is."""
    source = awaited(node) if is_wait(node) else node
    start = collective_of(source)
    if source is start and source is node:
        return _full(nbytes(*_operands(node)), nbytes(*values(node)), node)
    operands = start.args[0]  # of a coalesced collective a list, of which each item is one's
    operand = operands[source.args[1]] if isinstance(operands, list | tuple) else operands  # pyright: ignore
    return max(nbytes(*values(source)), nbytes(*values(operand)))  # pyright: ignore[reportArgumentType]


def elements(node: Node) -> int:
    """Count the elements that a collective moves: of the full buffer, an all_reduce's twice."""
    sent, received = (sum(x.numel() for x in xs) for xs in (_operands(node), values(node)))
    return 2 * sent if "all_reduce" in str(node.target) else _full(sent, received, node)


def _full(sent: int, received: int, node: Node) -> int:
    """Return the size of a collective's full buffer, padding included."""
    return sent * group_size(node) if is_gather(node) else max(sent, received)


def axis_of(node: Node, groups: Mapping[str, str] | None = None) -> str:
    """Return the axes that a collective runs over, joined by commas; "" for a group that is unknown.

    Args:
        node: the collective.
        groups: the axes of each process group, by its name; those of a planned world are known without.
    """
    for x in [*node.args, *node.kwargs.values()]:
        if isinstance(x, str) and (x.startswith(PLANNED) or x in (groups or {})):
            return x.removeprefix(PLANNED) if groups is None or x not in groups else groups[x]
    return ""


def wire(node: Node) -> str:
    """Return a collective's kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
    return next((kind for kind in kinds if kind in str(node.target)), "all_reduce")
