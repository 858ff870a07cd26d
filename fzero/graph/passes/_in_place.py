"""in_place: an all_reduce overwrites its operand if nothing else reads the operand."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph._ir import copy_graph, values
from fzero.graph._ops import is_view
from fzero.graph._storages import storages
from fzero.graph.loop._scan import loop_of

__all__ = ["IN_PLACE", "in_place"]

IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}


def in_place(graph: Graph) -> Graph:
    """Let an all_reduce overwrite its operands if they are no arguments and have no other reader.

    Torch's functional all_reduce copies its operand first: a second copy of a unit's gradients.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results.
    """
    if not any(n.target in IN_PLACE for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    memory = storages(graph)
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        sums = {s for s in memory.of.get(node, ()) if loop_of(node)}  # a loop only passes its sums on
        for s in [] if is_view(node) else dict.fromkeys(memory.read_by(node)):
            if s in sums:
                continue
            readers.setdefault(s, []).append(node)
    for node in graph.nodes:
        if node.target not in IN_PLACE:
            continue
        argument: Any = node.args[0]
        operands: list[Node] = (
            [argument] if isinstance(argument, Node) else list(argument)
        )  # an operand may occur twice
        operand_storages = [memory.of[a][0] for a in operands]
        is_exclusive = all(readers[s] == [node] and memory.born[s].op == "call_function" for s in operand_storages)
        if is_exclusive and len(set(operand_storages)) == len(operand_storages) and _dense(operands):
            node.target = IN_PLACE[node.target]
            node.meta["val"] = argument.meta["val"] if argument is operands[0] else [a.meta["val"] for a in operands]
    return graph


def _dense(operands: Sequence[Node]) -> bool:
    return all(x.is_contiguous() for a in operands for x in values(a))
