"""The size, the axes and the kind of a collective, from its node."""

from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fzero.axes import PLANNED
from fzero.graph.ir._collective_nodes import is_gather, is_wait, source_collective, wait_source
from fzero.graph.ir._nodes import nbytes, node_stand_ins

__all__ = ["collective_axes", "collective_kind", "full_bytes", "group_size", "moved_numel"]


def group_size(node: Node) -> int:
    """Return the number of ranks that a collective's sizes show; 1 for an all_reduce, whose sizes do not show it."""
    if is_gather(node):
        return node.args[1]  # pyright: ignore[reportReturnType]
    input_bytes, output_bytes = nbytes(*_collective_operands(node)), nbytes(*node_stand_ins(node))
    return max(input_bytes, output_bytes) // max(min(input_bytes, output_bytes), 1)


def _collective_operands(node: Node) -> list[torch.Tensor]:
    """List the operands of a collective: its first argument, one tensor or several."""
    tensors: list[torch.Tensor] = []
    map_arg(node.args[0], lambda a: tensors.extend(node_stand_ins(a)))
    return tensors


def full_bytes(node: Node) -> int:
    """Count the bytes of a collective's full buffer. For a wait or an item, count its part of the collective."""
    source = wait_source(node) if is_wait(node) else node
    start = source_collective(source)
    if source is start and source is node:
        return _full_size(nbytes(*_collective_operands(node)), nbytes(*node_stand_ins(node)), node)
    operands = start.args[0]  # a coalesced collective has a list of operands, one for each item
    operand = operands[source.args[1]] if isinstance(operands, list | tuple) else operands  # pyright: ignore
    return max(nbytes(*node_stand_ins(source)), nbytes(*node_stand_ins(operand)))  # pyright: ignore[reportArgumentType]


def moved_numel(node: Node) -> int:
    """Count the elements that a collective moves: those of the full buffer, twice for an all_reduce."""
    input_numel, output_numel = (
        sum(x.numel() for x in xs) for xs in (_collective_operands(node), node_stand_ins(node))
    )
    return 2 * input_numel if "all_reduce" in str(node.target) else _full_size(input_numel, output_numel, node)


def _full_size(input_size: int, output_size: int, node: Node) -> int:
    """Return the size of a collective's full buffer, padding included."""
    return input_size * group_size(node) if is_gather(node) else max(input_size, output_size)


def collective_axes(node: Node, groups: Mapping[str, str] | None = None) -> str:
    """Return the axes that a collective runs over, joined by commas; "" for a group that is unknown.

    Args:
        node: the collective.
        groups: the axes of each process group, by the group's name. The groups of a planned world need no entry.
    """
    for x in [*node.args, *node.kwargs.values()]:
        if isinstance(x, str) and (x.startswith(PLANNED) or x in (groups or {})):
            return x.removeprefix(PLANNED) if groups is None or x not in groups else groups[x]
    return ""


def collective_kind(node: Node) -> str:
    """Return a collective's kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
    return next((kind for kind in kinds if kind in str(node.target)), "all_reduce")
