"""The work of nodes: their FLOPs, which are cheap, and which may run at any time since they read inputs alone."""

import functools
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._torch import OneNode, OpOverload, flop_formulas, with_query_heads
from fzero.graph.ir._collective_nodes import (
    GATHERS,
    REDUCE_COLLECTIVES,
    WAIT,
    is_gather,
    is_maximum,
    is_reduce_collective,
    is_wait,
    is_write,
    sends_codes,
)
from fzero.graph.ir._nodes import aten, is_input
from fzero.graph.ir._ops import changes_layout, encodes, is_known_cheap, is_view_operation

__all__ = [
    "feeding_work",
    "flops",
    "input_only_nodes",
    "is_cheap",
    "parameter_gathers",
]

# torch counts no FLOPs for a CPU's attention: take the GPU's operation of the same work
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def is_cheap(node: Node) -> bool:
    """Return whether a node may run wherever that saves memory: communication, data movement, pointwise arithmetic."""
    return node.op == "call_function" and (_is_cheap_operation(node.target) or sends_codes(node))


@functools.lru_cache(maxsize=4096)
def _is_cheap_operation(operation: Any) -> bool:
    if operation is WAIT or operation in GATHERS or operation in REDUCE_COLLECTIVES or is_view_operation(operation):
        return True
    if isinstance(operation, OpOverload) and operation.overloadpacket in flop_formulas():
        return False
    if not isinstance(operation, OpOverload | OneNode):
        return False
    return is_known_cheap(operation)


def input_only_nodes(nodes: Sequence[Node]) -> set[Node]:
    """List the cheap nodes that depend on inputs alone, through cheap nodes."""
    input_only: set[Node] = set()
    for n in nodes:
        movable = is_cheap(n) and (not is_reduce_collective(n) or is_maximum(n)) and not is_write(n)
        if movable and all(is_input(a) or a in input_only for a in n.all_input_nodes):
            input_only.add(n)
    return input_only


def parameter_gathers(graph: Graph) -> list[Node]:
    """List the gathers whose operands depend on the graph's inputs alone: they may run at any time.

    A codec's gather needs the largest magnitudes of the unit's blocks first, which are reduced over the ranks.
    """
    from_inputs: set[Node] = set()
    gathers = []
    for node in graph.nodes:
        is_static = all(a in from_inputs for a in node.all_input_nodes)
        is_light = changes_layout(node) or encodes(node) or is_maximum(node) or is_wait(node)
        if is_input(node) or (is_static and is_light):
            from_inputs.add(node)
        elif is_gather(node) and is_static:
            gathers.append(node)
            from_inputs.add(node)  # a unit over several axes may be gathered over one after the other
    return gathers


def feeding_work(graph: Graph) -> set[Node]:
    """List the nodes that are not cheap, such as matrix products, and all nodes that these depend on."""
    feeding: set[Node] = set()
    for n in reversed(graph.nodes):
        if n.op == "call_function" and not is_cheap(n):
            feeding.add(n)
        if n in feeding:
            feeding.update(n.all_input_nodes)
    return feeding


def flops(node: Node) -> int:
    """Count the floating-point operations of a matrix product, a convolution or attention; 0 for other nodes."""
    cached_flops = node.meta.get("flops", ())  # of this node, or of the node that it is a copy of
    if cached_flops and cached_flops[0] is node.target:
        return cached_flops[1]
    packet = getattr(node.target, "overloadpacket", None)
    packet = _ATTENTION.get(packet, packet)
    if packet not in flop_formulas():
        node.meta["flops"] = (node.target, 0)
        return 0

    def val(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, Node) else x

    args = with_query_heads(packet, map_arg(node.args, val))
    kwargs = map_arg(node.kwargs, val)
    count = int(flop_formulas()[packet](*args, **kwargs, out_val=node.meta.get("val")))
    node.meta["flops"] = (node.target, count)
    return count
