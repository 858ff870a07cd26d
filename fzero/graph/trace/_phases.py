"""A rank of a pipeline in a trace: what its turn is made of, before it becomes a loop.

What was run for its shapes alone goes. In each backward pass, what leads to the gradient that is sent comes first.
"""

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.phases import ASIDE, ASIDE_ENDS, BEGINS, NEEDS, SENT, RankSchedule, rank_schedule_of

__all__ = ["needed_by", "renumbered", "sends_first", "track_at", "without_asides"]


def without_asides(graph: Graph) -> None:
    """Remove what was run for its shapes alone."""
    while True:
        nodes = list(graph.nodes)
        begin = next((i for i, n in enumerate(nodes) if n.target is ASIDE), None)
        if begin is None:
            return
        end = next(i for i, n in enumerate(nodes) if i > begin and n.target is ASIDE_ENDS)
        for n in reversed(nodes[begin : end + 1]):
            if not n.users:
                graph.erase_node(n)


def track_at(start: Node) -> RankSchedule | None:
    """Return the track of a turn that is one of a pipeline's."""
    node = _needs(start)
    return None if node is None else rank_schedule_of(int(node.args[1]))  # pyright: ignore[reportArgumentType]


def needed_by(start: Node) -> list[Node]:
    """List what a pipeline's loop is given whether its turns read it or not."""
    node = _needs(start)
    return [] if node is None else list(node.args[2])  # pyright: ignore[reportArgumentType]


def _needs(start: Node) -> Node | None:
    return next((n for n in start.users if n.target is NEEDS), None)


def sends_first(start: Node) -> None:
    """In each backward pass of a pipeline's turn, move what leads to the gradient that is sent in front of the rest."""
    nodes = list(start.graph.nodes)
    nodes = nodes[nodes.index(start) :]
    for i, begin in enumerate(nodes):
        if begin.target is not BEGINS or begin.args[0] != "B":
            continue
        stop = next((j for j in range(i + 1, len(nodes)) if nodes[j].target is BEGINS), len(nodes))
        sent = next((n for n in nodes[i + 1 : stop] if n.target is SENT), None)
        if sent is None:
            continue
        leading = {sent}
        for n in reversed(nodes[i + 1 : stop]):
            if n in leading:
                leading.update(n.all_input_nodes)
        at = begin
        for n in nodes[i + 1 : stop]:
            if n in leading:
                at.append(n)
                at = n


def renumbered(graph: Graph) -> Graph:
    """Copy a graph with names by what is left in it: the same on all ranks of a pipeline, whose stages differ."""
    out, copies = Graph(), dict[Node, Node]()
    for n in graph.nodes:
        args, kwargs = (map_arg(x, copies.__getitem__) for x in (n.args, n.kwargs))  # pyright: ignore
        copies[n] = out.create_node(n.op, n.target, args, kwargs, None if n.op == "call_function" else n.name)  # pyright: ignore
        copies[n].meta = dict(n.meta)
    return out
