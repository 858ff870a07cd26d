"""donate: new values are written into the buffers of the arguments that they replace."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from fzero.graph._ir import COPY, aten, copied, is_input, results
from fzero.graph._storages import storages

__all__ = ["donate"]


def donate(graph: Graph, pairs: Sequence[tuple[int, int]], donated: Sequence[int] = ()) -> Graph:
    """Write results into donated arguments, so that no second copy of them exists when the graph ends.

    Args:
        graph: a flat graph.
        pairs: `(result, argument)` positions: the result, of the argument's shape and dtype, is copied into it.
        donated: positions of all donated arguments; results that are views of one become copies, since its buffer
            is about to be overwritten.

    Returns:
        A graph whose results at the first positions are the arguments at the second, written.
    """
    graph = copied(graph)
    inputs = [n for n in graph.nodes if is_input(n)]
    handed = results(graph)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    lent = storages(graph)
    into = dict(pairs)
    given = {s for i in {*donated, *into.values()} for s in lent.of[inputs[i]]}

    def safe(value: Node) -> Node:
        """Copy a value that lies in a donated argument."""
        if not given & set(lent.of[value]):
            return value
        clone = graph.call_function(aten.clone.default, (value,))
        clone.meta = {**value.meta, "val": value.meta["val"].clone()}
        return clone

    with graph.inserting_before(output):
        for i, value in enumerate(handed):
            if not isinstance(value, Node):
                continue
            target = inputs[into[i]] if i in into else None
            handed[i] = value if value is target else safe(value)
        for i, j in pairs:
            if handed[i] is not inputs[j]:
                write = graph.call_function(COPY, (inputs[j], handed[i]))
                write.meta = dict(inputs[j].meta)
                handed[i] = write
    output.args = (tuple(handed),)
    return graph
