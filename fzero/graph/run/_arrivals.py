"""arriving: copies from a GPU to the host are on their way until the host reads them.

The copies stand on the device's own stream, in the order of its work. So what a copy reads cannot be written before it
is done, and the host alone has to wait. A copy from the host needs no wait: what reads it stands behind it.
"""

from collections.abc import Collection

from torch.fx import Graph, Node

from fzero.collectives.moves import arrived, on_its_way
from fzero.graph.ir import copied, is_input, values
from fzero.graph.loops import loop_of, with_body
from fzero.graph.passes._uses import family
from fzero.graph.spaces import DOWN

__all__ = ["arriving"]


def arriving(graph: Graph, kinds: Collection[str] = ("cuda",)) -> Graph:
    """Start each copy to the host where it stands, and wait for it before its first use.

    Args:
        graph: a scheduled graph.
        kinds: the types of the devices whose copies can be on their way.

    Returns:
        A graph that an executor runs in its order; the graph itself if it copies nothing from such a device.
    """
    if not any(values(n)[0].device.type in kinds for n in graph.nodes if is_input(n) and values(n)):
        return graph
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if loop := loop_of(node):
            with_body(node, arriving(loop.body, kinds))
        elif node.target is DOWN and values(node.all_input_nodes[0])[0].device.type in kinds:
            _wait_before_use(graph, node, index)
    return graph


def _wait_before_use(graph: Graph, node: Node, index: dict[Node, int]) -> None:
    """Let a copy be on its way; its views are made of what has arrived."""
    views, users = family(node)
    node.target = on_its_way
    with graph.inserting_before(min(users, key=index.__getitem__)):
        made = {node: graph.call_function(arrived, (node,))}
        made[node].meta = dict(node.meta)
        for view in sorted(views[1:], key=index.__getitem__):
            made[view] = graph.node_copy(view, lambda a: made.get(a, a))
    for use in users:
        for old in views:
            use.replace_input_with(old, made[old])
    for view in sorted(views[1:], key=index.__getitem__, reverse=True):
        graph.erase_node(view)
