"""slice_of_gather: the update of a unit reads and writes the rank's part of the unit in place, without copies."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fzero._torch import storage_id
from fzero.graph._ir import COPY, GATHER_INTO, aten, copy_graph, is_input, values
from fzero.graph._ops import name_of

__all__ = ["slice_of_gather"]


def slice_of_gather(graph: Graph, places: Sequence[tuple[str, int]]) -> Graph:
    """Read a rank's old part of a unit from the leaves' buffer, and write its new part into it, without copies.

    A step of stage 1 or 2 copies its own part out of the leaves, and the new part back into them. If the leaves lie
    side by side in one buffer, as `step.init` lays them, the part is a view of the buffer, and both copies are
    removed. A unit whose size the ranks do not divide keeps its copies: the last part would reach beyond the leaves.

    Args:
        graph: a flat graph whose units are gathered into their leaves (`gather_into`).
        places: this rank's place in each process group, by the group's name.

    Returns:
        A graph with the same results.
    """
    if not any(n.target is GATHER_INTO for n in graph.nodes):
        return graph
    place = dict(places)
    graph = copy_graph(graph)
    for gather in [n for n in graph.nodes if n.target is GATHER_INTO]:
        first = _first_of_buffer(gather)
        if first is None or gather.args[2] not in place:
            continue
        new = gather.all_input_nodes[0]
        start = place[str(gather.args[2])] * values(new)[0].numel()
        with graph.inserting_before(next(n for n in graph.nodes if not is_input(n))):
            own_part = _view(graph, first, start, values(new)[0].numel())
        for pack in [n for n in graph.nodes if name_of(n) == "cat"]:
            if _lies_in(pack, own_part):
                pack.replace_all_uses_with(own_part)
                _erase(graph, pack)
        with graph.inserting_before(gather):
            written = graph.call_function(COPY, (own_part, new))
        written.meta = {**gather.meta, "val": own_part.meta["val"]}
        gather.args = (written, *gather.args[1:])
    return graph


def _first_of_buffer(gather: Node) -> Node | None:
    """Return the first leaf of a gathered unit if its leaves lie side by side in one buffer that the parts fill."""
    _, ranks, _, leaves, offsets = gather.args
    assert isinstance(leaves, Sequence) and isinstance(offsets, Sequence) and isinstance(ranks, int)
    (new,) = values(gather.all_input_nodes[0])
    tensors = [values(x)[0] for x in leaves if isinstance(x, Node)]
    one = len({storage_id(x) for x in tensors}) == 1 and all(x.is_contiguous() for x in tensors)
    if not one or [x.storage_offset() for x in tensors] != list(offsets):
        return None
    fills = sum(x.numel() for x in tensors) == ranks * new.numel()
    return leaves[0] if fills and isinstance(leaves[0], Node) else None


def _view(graph: Graph, leaf: Node, start: int, numel: int) -> Node:
    """View a part of the buffer that a leaf lies in."""
    (x,) = values(leaf)
    view = graph.call_function(aten.as_strided.default, (leaf, [numel], [1], start))
    view.meta = {"val": torch.as_strided(x, [numel], [1], start), "own_part": True}
    return view


def _lies_in(pack: Node, own_part: Node) -> bool:
    """Return whether a node concatenates exactly the pieces that the rank's own part consists of."""
    (part,) = values(own_part)
    end = part.storage_offset()
    for piece in pack.all_input_nodes:
        (x,) = values(piece)
        if storage_id(x) != storage_id(part) or x.storage_offset() != end or x.dim() != 1 or not x.is_contiguous():
            return False
        end += x.numel()
    return end == part.storage_offset() + part.numel() and values(pack)[0].dim() == 1


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node without users, and then its operands that have no other user."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for a in operands:
        if not a.users and not is_input(a):
            _erase(graph, a)
