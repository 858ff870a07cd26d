"""Queries on a flat graph of aten operations: which nodes communicate or may move, and the bytes of collectives.

The graphs are functional: no operation writes. The exceptions are `copy_`s and all_gathers into inputs, which
donation adds, and in-place all_reduces of values that nothing else reads. Nodes carry `meta["val"]`, stand-ins for
their values without memory. They may carry `meta["unit"]`, the unit of a collective, `meta["label"]`, the name of an
input, and `meta["kind"]`, the input's kind. A value with `meta[LATE]` is computed right before its use, not as early
as possible. A value with `meta[FUSED]` is computed within the compiled kernel that reads it; a node with
`meta[COMPILED]` is such a kernel.
"""

import functools
import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._torch import OneNode, OpOverload, c10d, flop_formulas, graph_of, with_query_heads
from fzero.collectives import gloo
from fzero.graph._ops import changes_layout, decodes, encodes, is_known_cheap, is_view, is_view_operation

__all__ = [
    "CASTS",
    "COMPILED",
    "COPY",
    "FUSED",
    "GATHER_INTO",
    "LATE",
    "METRIC",
    "SCALINGS",
    "WAIT",
    "after_needs",
    "aten",
    "check_order",
    "collective_of",
    "collectives_before",
    "copy_graph",
    "describe",
    "dtypes_and_shapes",
    "feeding_work",
    "flops",
    "graph_results",
    "input_only_nodes",
    "is_carried",
    "is_cheap",
    "is_collective",
    "is_gather",
    "is_input",
    "is_maximum",
    "is_reduce_collective",
    "is_wait",
    "is_write",
    "nbytes",
    "parameter_gathers",
    "signature",
    "sort_graph",
    "source_of_wait",
    "stand_ins_of",
    "stand_ins_of_args",
    "start_of",
    "users_through_views",
    "views_and_users",
    "write_part",
]


aten: Any = torch.ops.aten

LATE, FUSED, COMPILED = "late", "fused", "compiled"


# torch counts no FLOPs for a CPU's attention: take the GPU's operation of the same work
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
METRIC = "(metric)"  # `meta["unit"]` of a collective of the user
WAIT = c10d.wait_tensor.default
GATHER_INTO = gloo.all_gather_into  # followed by a wait for each argument that it writes
_GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default, GATHER_INTO)
_REDUCE_COLLECTIVES = (
    c10d.reduce_scatter_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default,
    c10d.all_reduce_coalesced.default,
    c10d.all_reduce_.default,
    c10d.all_reduce_coalesced_.default,
)
_EXCHANGES = (c10d.all_to_all_single.default, c10d.broadcast.default)
COPY = aten.copy_.default
SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
CASTS = (aten._to_copy.default, aten.to.dtype)


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return node.target is WAIT


def is_gather(node: Node) -> bool:
    """Return whether a node starts an all_gather."""
    return node.target in _GATHERS


def is_reduce_collective(node: Node) -> bool:
    """Return whether a node starts a reduce_scatter or an all_reduce, or sends a gradient's codes to be summed."""
    return node.target in _REDUCE_COLLECTIVES or _sends_codes(node)


def _sends_codes(node: Node) -> bool:
    """Return whether a node sends each rank its part of a unit's codes. Only such an all_to_all has a unit."""
    return node.target is c10d.all_to_all_single.default and node.meta.get("unit", METRIC) != METRIC


def is_maximum(node: Node) -> bool:
    """Return whether a node starts an all_reduce of maxima, such as the largest magnitudes of a unit's blocks."""
    return node.target in _REDUCE_COLLECTIVES and "max" in node.args


def write_part(buffer: torch.Tensor, part: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    """Write a part into a buffer along a dimension, from an index on; return the buffer."""
    buffer.narrow(dim, start, part.shape[dim]).copy_(part)
    return buffer


def is_write(node: Node) -> bool:
    """Return whether a node writes into arguments."""
    return node.target is COPY or node.target is GATHER_INTO


def is_collective(node: Node) -> bool:
    """Return whether a node starts a collective."""
    return node.target in _GATHERS or node.target in _REDUCE_COLLECTIVES or node.target in _EXCHANGES


def _is_exchange(node: Node) -> bool:
    """Return whether a node exchanges activations or other values between ranks. The scheduler orders it like work."""
    return node.target in _EXCHANGES and not _sends_codes(node)


def is_input(node: Node) -> bool:
    """Return whether a node is an argument of the graph."""
    return node.op == "placeholder"


def graph_results(graph: Graph) -> list[Any]:
    """List a graph's results: nodes, and None where the function returned none."""
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])  # pyright: ignore[reportArgumentType]


def source_of_wait(wait: Node) -> Node:
    """Return the collective, or its item, that a wait waits for. If carried, it started in the iteration before."""
    source = wait.all_input_nodes[0]
    return source.meta.get("carried", source)


def is_carried(node: Node) -> bool:
    """Return whether a node is a reduction that an earlier iteration of a loop started."""
    return "carried" in node.meta


def start_of(wait: Node) -> Node:
    """Return the collective that a wait waits for."""
    return collective_of(source_of_wait(wait))


def collective_of(source: Node) -> Node:
    """Return the collective of a node: the node itself, or the source of an item."""
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def stand_ins_of(node: Node) -> list[torch.Tensor]:
    """List the (stand-in) tensors that a node computes."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [val]
    return [x for x in val if isinstance(x, torch.Tensor)] if isinstance(val, tuple | list) else []


def stand_ins_of_args(node: Node) -> list[torch.Tensor]:
    """List the tensors that a node reads."""
    return [x for a in node.all_input_nodes for x in stand_ins_of(a)]


def dtypes_and_shapes(node: Node) -> str:
    """Show the dtypes and shapes of a node's tensors: "float32[4, 8], int64[4]"."""
    return ", ".join([f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in stand_ins_of(node)])


def nbytes(*xs: torch.Tensor) -> int:
    """Count the bytes of tensors' elements."""
    return sum([x.numel() * x.element_size() for x in xs])


def users_through_views(node: Node) -> list[Node]:
    """List the nodes, other than views, that use a node or a view of it."""
    users = list(node.users)
    for user in users:  # grows as it goes
        users += list(user.users) if is_view(user) else []
    return [u for u in users if not is_view(u)]


def views_and_users(value: Node, decoded: bool = False) -> tuple[list[Node], list[Node]]:
    """Return a value's views (the value itself first), and the nodes that use the value through a view.

    With `decoded` the value is a gathered unit, and a node that decodes it counts as a view, too.
    """
    views = [value]
    users = []
    visited = {value}
    for view in views:  # grows as it goes
        for user in view.users:
            if user not in visited:
                visited.add(user)
                (views if is_view(user) or (decoded and decodes(user)) else users).append(user)
    return views, users


def is_cheap(node: Node) -> bool:
    """Return whether a node may run wherever that saves memory: communication, data movement, pointwise arithmetic."""
    return node.op == "call_function" and (_is_cheap_operation(node.target) or _sends_codes(node))


@functools.lru_cache(maxsize=4096)
def _is_cheap_operation(operation: Any) -> bool:
    if operation is WAIT or operation in _GATHERS or operation in _REDUCE_COLLECTIVES or is_view_operation(operation):
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


def collectives_before(nodes: Iterable[Node]) -> dict[Node, int]:
    """Count for each node the collectives that must run one after another before its result is known."""
    counts: dict[Node, int] = {}
    for n in nodes:
        counts[n] = max([counts.get(a, 0) for a in n.all_input_nodes], default=0) + is_collective(n)
    return counts


def copy_graph(graph: Graph) -> Graph:
    """Copy a graph."""
    return graph_of(graph.nodes)


def check_order(graph: Graph) -> None:
    """Check that each node of a graph follows its arguments. `Graph.lint` looks at much more, and takes seconds.

    Raises:
        AssertionError: if a node comes before an argument, or has one of another graph.
    """
    before: set[Node] = set()
    for node in graph.nodes:
        if not before.issuperset(node.all_input_nodes):
            late = next(a for a in node.all_input_nodes if a not in before)
            raise AssertionError(f"fzero.jit scheduled {node} before its argument {late}: please report this")
        before.add(node)


def sort_graph(graph: Graph) -> Graph:
    """Copy a graph with every node after its arguments, and otherwise in the old order.

    An argument that comes too late is moved right before its user. Postponing the user instead would leave nodes that
    wait for nothing, such as values recomputed for the backward pass, long before their use.
    """
    index = {n: i for i, n in enumerate(graph.nodes)}
    order: dict[Node, None] = dict.fromkeys(n for n in graph.nodes if is_input(n))
    for node in graph.nodes:
        stack = [node]
        while stack:
            missing = [a for a in stack[-1].all_input_nodes if a not in order]
            if len(stack) > len(index):
                raise RuntimeError(f"{node} needs its own result: a pass joined nodes of which one depends on another")
            if missing:
                stack.append(min(missing, key=index.__getitem__))
            else:
                order[stack.pop()] = None
    return graph_of(order)


def after_needs(nodes: Sequence[Node], needs: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Sort nodes so that each follows its arguments and the further nodes that it `needs`; keep the order otherwise.

    Args:
        nodes: all nodes of a graph.
        needs: for some nodes, the nodes that must run before besides the arguments.
    """
    index = {n: i for i, n in enumerate(nodes)}
    needed_by: dict[Node, list[Node]] = {}
    for n, prerequisites in needs.items():
        for prerequisite in prerequisites:
            needed_by.setdefault(prerequisite, []).append(n)
    missing = {n: len(n.all_input_nodes) + len(needs.get(n, ())) for n in nodes}
    ready = [i for i, n in enumerate(nodes) if not missing[n]]
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in (*node.users, *needed_by.get(node, ())):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, index[user])
    return order


def flops(node: Node) -> int:
    """Count the floating-point operations of a matrix product, a convolution or attention; 0 for other nodes."""
    cached = node.meta.get("flops", ())  # of this node, or of the node that it is a copy of
    if cached and cached[0] is node.target:
        return cached[1]
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


def describe(node: Node, same: Mapping[Node, Node]) -> tuple[str, str]:
    """Describe a node's operation and arguments: nodes that compute the same value have equal descriptions.

    Args:
        node: an operation.
        same: for some nodes, a node of the same value to name in their place.
    """

    def name(a: Node) -> Any:
        return _Named(same.get(a, a).name)

    args: Any = map_arg((node.args, node.kwargs), name)  # pyright: ignore[reportArgumentType]
    return str(node.target), repr(args)


class _Named(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{self}"


def signature(x: Any) -> tuple[Any, ...]:
    """Describe the properties of a tensor that compiled code may depend on."""
    if not isinstance(x, torch.Tensor):
        return (type(x),)
    return (tuple(x.shape), tuple(x.stride()), x.dtype, x.device)
