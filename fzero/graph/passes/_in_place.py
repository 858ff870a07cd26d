"""in_place: an all_reduce of a buffer that nothing else reads happens in that buffer."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph._ir import copied, values
from fzero.graph._ops import is_view
from fzero.graph._storages import storages
from fzero.graph.loop._scan import loop_of

__all__ = ["IN_PLACE", "in_place"]

IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}


def in_place(graph: Graph) -> Graph:
    """Let all_reduces overwrite their operands, where these are no arguments and have no other reader.

    Torch's functional all_reduce copies its operand first: a unit's gradients, once more.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results.
    """
    if not any(n.target in IN_PLACE for n in graph.nodes):
        return graph
    graph = copied(graph)
    lent = storages(graph)
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        handed_on = {s for s in lent.of.get(node, ()) if loop_of(node)}  # its sums: it reads them for their next reader
        for s in [] if is_view(node) else dict.fromkeys(lent.read_by(node)):
            if s in handed_on:
                continue
            readers.setdefault(s, []).append(node)
    for node in graph.nodes:
        if node.target not in IN_PLACE:
            continue
        given: Any = node.args[0]
        operands: list[Node] = [given] if isinstance(given, Node) else list(given)  # one may be there twice
        theirs = [lent.of[a][0] for a in operands]
        alone = all(readers[s] == [node] and lent.born[s].op == "call_function" for s in theirs)
        if alone and len(set(theirs)) == len(theirs) and _dense(operands):
            node.target = IN_PLACE[node.target]
            node.meta["val"] = given.meta["val"] if given is operands[0] else [a.meta["val"] for a in operands]
    return graph


def _dense(operands: Sequence[Node]) -> bool:
    return all(x.is_contiguous() for a in operands for x in values(a))
