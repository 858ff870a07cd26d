"""Passes that write results over arguments and over operands."""

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from fzero._torch import c10d
from fzero.graph.ir import COPY, aten, copy_graph, graph_results, is_input, is_view, node_stand_ins, storages
from fzero.graph.loop import node_loop

__all__ = ["donate", "in_place"]


def donate(graph: Graph, overwrites: Sequence[tuple[int, int]], donated: Sequence[int] = ()) -> Graph:
    """Write results into donated arguments, so that no second copy of them exists when the graph ends.

    Args:
        graph: a flat graph.
        overwrites: positions `(result, argument)`: the result is copied into the argument, of equal shape and dtype.
        donated: the positions of all donated arguments. A result that is a view of a donated argument becomes a copy,
            since the argument's buffer is overwritten.

    Returns:
        A graph in which each result of `overwrites` is its argument, overwritten.
    """
    graph = copy_graph(graph)
    inputs = [n for n in graph.nodes if is_input(n)]
    outputs = graph_results(graph)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    memory = storages(graph)
    into = dict(overwrites)
    donated_storages = {s for i in {*donated, *into.values()} for s in memory.indices[inputs[i]]}

    def copy_if_donated(value: Node) -> Node:
        """Copy a value that lies in a donated argument."""
        if not donated_storages & set(memory.indices[value]):
            return value
        clone = graph.call_function(aten.clone.default, (value,))
        clone.meta = {**value.meta, "val": value.meta["val"].clone()}
        return clone

    with graph.inserting_before(output):
        for i, value in enumerate(outputs):
            if not isinstance(value, Node):
                continue
            target = inputs[into[i]] if i in into else None
            outputs[i] = value if value is target else copy_if_donated(value)
        for i, j in overwrites:
            if outputs[i] is not inputs[j]:
                write = graph.call_function(COPY, (inputs[j], outputs[i]))
                write.meta = dict(inputs[j].meta)
                outputs[i] = write
    output.args = (tuple(outputs),)
    return graph


_IN_PLACE = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}


def in_place(graph: Graph) -> Graph:
    """Let an all_reduce overwrite its operands if they are not arguments and have no other reader.

    Torch's functional all_reduce copies its operand first: a second copy of a unit's gradients.

    Args:
        graph: a flat graph.

    Returns:
        A graph with the same results.
    """
    if not any(n.target in _IN_PLACE for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    memory = storages(graph)
    readers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        sums = {s for s in memory.indices.get(node, ()) if node_loop(node)}  # a loop only passes its sums on
        for s in [] if is_view(node) else dict.fromkeys(memory.read_by(node)):
            if s in sums:
                continue
            readers.setdefault(s, []).append(node)
    for node in graph.nodes:
        if node.target not in _IN_PLACE:
            continue
        argument: Any = node.args[0]
        # an operand may occur twice
        operands: list[Node] = [argument] if isinstance(argument, Node) else list(argument)
        operand_storages = [memory.indices[a][0] for a in operands]
        is_exclusive = all(readers[s] == [node] and memory.producers[s].op == "call_function" for s in operand_storages)
        if is_exclusive and len(set(operand_storages)) == len(operand_storages) and _are_dense(operands):
            node.target = _IN_PLACE[node.target]
            node.meta["val"] = argument.meta["val"] if argument is operands[0] else [a.meta["val"] for a in operands]
    return graph


def _are_dense(operands: Sequence[Node]) -> bool:
    return all(x.is_contiguous() for a in operands for x in node_stand_ins(a))
