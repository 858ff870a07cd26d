"""Cut: a scheduled graph as groups of nodes, of which each runs alone or is compiled as a segment."""

import operator

import torch
from torch.fx import Graph, Node

from fzero.graph.ir import is_collective, is_input, is_reduction, is_wait, users_through_views
from fzero.graph.loops import loop_of
from fzero.graph.ops import is_view, name_of

__all__ = ["cut", "is_alias", "parts_of_arguments", "runs_alone"]


def cut(graph: Graph) -> list[list[Node]]:
    """Cut a graph at its collectives and their packing, and where it goes on to another block's parameters.

    Blocks of one shape so give equal segments. Aliases are in no group: they go where they are used.

    Returns:
        Groups of nodes, in order: of one node that runs alone, or of nodes that are compiled together.
    """
    groups: list[list[Node]] = []
    home: dict[Node, list[Node]] = {}
    block, fresh = "", True
    for n in graph.nodes:
        if n.op != "call_function" or is_alias(n):
            continue
        if n.target is operator.getitem:  # a tuple does not leave its segment
            home[n.all_input_nodes[0]].append(n)
            continue
        if runs_alone(n):
            groups.append([n])
            fresh = True
            continue
        mine = next((b for a in n.all_input_nodes if (b := _block(a))), "")
        if mine and mine != block:
            block, fresh = mine, True
        if fresh:
            groups.append([])
        groups[-1].append(n)
        home[n] = groups[-1]
        fresh = False
    return groups


def runs_alone(node: Node) -> bool:
    """Return whether a node is compiled with no other: a collective, a wait, a loop, or a packing."""
    return is_collective(node) or is_wait(node) or loop_of(node) is not None or _packs(node)


def _packs(node: Node) -> bool:
    """Return whether a node packs a unit's gradients: Inductor would take the buffer as soon as the first is there."""
    users = users_through_views(node) if name_of(node) == "cat" else []
    return bool(users) and all(is_reduction(u) for u in users)


def is_alias(node: Node) -> bool:
    """Return whether a node is a view of one tensor, or an item of several such, of a collective or of a loop."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and (is_view(source) or is_collective(source) or loop_of(source) is not None)
    return is_view(node)


def _block(node: Node) -> str:
    """Return the repeated block whose argument (a parameter, a moment) a value is a view of, or ""."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node.meta.get("block", "") if is_input(node) else ""


def parts_of_arguments(graph: Graph) -> set[Node]:
    """List the views that cut an argument in several parts of one shape, as micro-batches are.

    They become arguments of segments: with its place in the argument inside, no segment would equal another part's.
    """
    found: dict[tuple[Node, torch.Size], list[Node]] = {}
    for n in graph.nodes:
        argument = n.args[0] if name_of(n) == "slice" else None
        if isinstance(argument, Node) and is_input(argument):
            found.setdefault((argument, n.meta["val"].shape), []).append(n)
    return {n for nodes in found.values() if len(nodes) > 1 for n in nodes}
