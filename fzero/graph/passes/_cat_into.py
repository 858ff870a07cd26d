"""cat_into: the parts of a concatenation are written into its result as they are computed."""

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from fzero.graph.ir import (
    Storages,
    aten,
    copy_graph,
    is_cheap,
    is_collective,
    is_input,
    is_view,
    is_wait,
    nbytes,
    node_stand_ins,
    op_name,
    storages,
    write_part,
)
from fzero.graph.loop import node_loop
from fzero.graph.planning import device_live_bytes

__all__ = ["cat_into"]

_LEAST_PARTS = 3


def cat_into(graph: Graph, fuses: bool = False) -> Graph:
    """Write parts into the result of their concatenation, so that they and the result do not exist at once.

    The gradient of a weight that was split, as by `fzero.nn.linear_cross_entropy`, is a concatenation of parts that are
    computed one after another. So are the tokens of `fzero.nn.tiled`. With this pass one part exists beside the result.

    The parts must be of one size, but for the last, and nothing else may read them. Parts are concatenated as before
    where they are few, and where the result would not be the largest thing in memory: it is allocated earlier.

    Args:
        graph: a flat graph.
        fuses: whether a compiler computes cheap parts within the kernel that concatenates them. These are left.

    Returns:
        A graph with the same results.
    """
    if not any(_concatenated_parts(n) for n in graph.nodes):
        return graph
    graph = copy_graph(graph)
    memory = storages(graph)
    places = {n: i for i, n in enumerate(graph.nodes)}
    live = device_live_bytes(list(graph.nodes))
    for node in [n for n in graph.nodes if _concatenated_parts(n)]:
        if _are_exclusive(node, memory, fuses) and _lowers_peak(node, places, live):
            _write_parts(graph, node, places)
    return graph


def _concatenated_parts(node: Node) -> Sequence[Node]:
    """List the parts of a concatenation of equal parts; none if a node is nothing of the kind."""
    parts = node.args[0] if op_name(node) == "cat" else ()
    if not isinstance(parts, Sequence) or len(parts) < _LEAST_PARTS or not all(isinstance(x, Node) for x in parts):
        return ()
    result, values = node.meta["val"], [x.meta["val"] for x in parts if isinstance(x, Node)]
    if {(x.ndim, x.dtype) for x in values} != {(result.ndim, result.dtype)} or not result.is_contiguous():
        return ()
    occur_once = len(node.all_input_nodes) == len(parts)
    return node.all_input_nodes if len({x.shape for x in values[:-1]}) == 1 and occur_once else ()


def _are_exclusive(node: Node, memory: Storages, fuses: bool) -> bool:
    """Return whether each part is all of a storage that an operation makes for the concatenation alone."""
    storages_of = [memory.indices[x] for x in node.all_input_nodes]
    if len({*storages_of}) < len(storages_of):
        return False
    for x, (storage,) in zip(node.all_input_nodes, storages_of, strict=True):
        producer = memory.producers[storage]
        fills_storage = memory.sizes[storage] == nbytes(*node_stand_ins(x))
        if (
            is_input(producer)
            or is_collective(producer)
            or is_wait(producer)
            or node_loop(producer) is not None
            or not fills_storage
        ):
            return False
        while x is not producer:
            if len(x.users) > 1 or not is_view(x):
                return False
            x = x.all_input_nodes[0]
        if len(producer.users) > 1 or (fuses and is_cheap(producer)):
            return False
    return True


def _lowers_peak(node: Node, places: Mapping[Node, int], live: Sequence[int]) -> bool:
    """Return whether memory is fullest at a concatenation, also if its result exists from the first part on."""
    order = sorted(node.all_input_nodes, key=places.__getitem__)
    unwritten_bytes = nbytes(*node_stand_ins(node))
    peak = 0
    for x, next_node in zip(order, [*order[1:], node], strict=True):
        peak = max(peak, *[live[i] + unwritten_bytes for i in range(places[x], places[next_node])])
        unwritten_bytes -= nbytes(*node_stand_ins(x))
    return peak < live[places[node]]


def _write_parts(graph: Graph, node: Node, places: Mapping[Node, int]) -> None:
    """Replace a concatenation by an empty buffer, into which each part is written right behind its computation."""
    value, parts = node.meta["val"], node.all_input_nodes
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % value.ndim  # type: ignore[operator]
    starts, end = {}, 0
    for x in parts:
        starts[x], end = end, end + x.meta["val"].shape[dim]
    order = sorted(parts, key=places.__getitem__)
    options = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(order[0]):
        buffer = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
    buffer.meta = dict(node.meta)
    for x in order:
        with graph.inserting_after(x):
            buffer = graph.call_function(write_part, (buffer, x, dim, starts[x]))
        buffer.meta = {**node.meta, "val": value.view(value.shape)}
    node.replace_all_uses_with(buffer)
    graph.erase_node(node)
