"""A traced iteration of a pipeline's rank, before it becomes a loop."""

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.loop._pipeline_marks import BEGIN_SHAPES_ONLY, END_SHAPES_ONLY, MARK_PIPELINE
from fzero.graph.loop._rank_schedule import RankSchedule, rank_schedule_of

__all__ = ["drop_shapes_only", "loop_arguments", "rank_schedule_at", "rename_nodes"]


def drop_shapes_only(graph: Graph) -> None:
    """Remove the regions that ran only for their shapes."""
    while True:
        nodes = list(graph.nodes)
        begin = next((i for i, n in enumerate(nodes) if n.target is BEGIN_SHAPES_ONLY), None)
        if begin is None:
            return
        end = next(i for i, n in enumerate(nodes) if i > begin and n.target is END_SHAPES_ONLY)
        for n in reversed(nodes[begin : end + 1]):
            if not n.users:
                graph.erase_node(n)


def rank_schedule_at(start: Node) -> RankSchedule | None:
    """Return the schedule of the pipeline's rank that an iteration belongs to; None for other loops."""
    node = _pipeline_marker(start)
    return None if node is None else rank_schedule_of(int(node.args[1]))  # pyright: ignore[reportArgumentType]


def loop_arguments(start: Node) -> list[Node]:
    """List the nodes that are arguments of a pipeline's loop, whether or not its iterations read them."""
    node = _pipeline_marker(start)
    return [] if node is None else list(node.args[2])  # pyright: ignore[reportArgumentType]


def _pipeline_marker(start: Node) -> Node | None:
    return next((n for n in start.users if n.target is MARK_PIPELINE), None)


def rename_nodes(graph: Graph) -> Graph:
    """Copy a graph and name its nodes anew, so that names are the same on all ranks of a pipeline."""
    out = Graph()
    copies = dict[Node, Node]()
    for n in graph.nodes:
        args, kwargs = (map_arg(x, copies.__getitem__) for x in (n.args, n.kwargs))  # pyright: ignore
        copies[n] = out.create_node(n.op, n.target, args, kwargs, None if n.op == "call_function" else n.name)  # pyright: ignore
        copies[n].meta = dict(n.meta)
    return out
