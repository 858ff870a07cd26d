"""donate: results are written into the buffers of the arguments that they replace."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from fzero.graph._ir import COPY, aten, copy_graph, is_input, results
from fzero.graph._storages import storages

__all__ = ["donate"]


def donate(graph: Graph, pairs: Sequence[tuple[int, int]], donated: Sequence[int] = ()) -> Graph:
    """Write results into donated arguments, so that no second copy of them exists when the graph ends.

    Args:
        graph: a flat graph.
        pairs: positions `(result, argument)`: the result is copied into the argument, of equal shape and dtype.
        donated: the positions of all donated arguments. A result that is a view of a donated argument becomes a copy,
            since the argument's buffer is overwritten.

    Returns:
        A graph in which each result of `pairs` is its argument, overwritten.
    """
    graph = copy_graph(graph)
    inputs = [n for n in graph.nodes if is_input(n)]
    outputs = results(graph)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    memory = storages(graph)
    into = dict(pairs)
    donated_storages = {s for i in {*donated, *into.values()} for s in memory.of[inputs[i]]}

    def copy_if_donated(value: Node) -> Node:
        """Copy a value that lies in a donated argument."""
        if not donated_storages & set(memory.of[value]):
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
        for i, j in pairs:
            if outputs[i] is not inputs[j]:
                write = graph.call_function(COPY, (inputs[j], outputs[i]))
                write.meta = dict(inputs[j].meta)
                outputs[i] = write
    output.args = (tuple(outputs),)
    return graph
