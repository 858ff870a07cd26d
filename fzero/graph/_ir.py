"""Reading a flat graph of aten operations: what communicates, what may move, and what a collective moves."""

import functools
import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fzero._torch import OneNode, OpOverload, c10d, graph_of
from fzero.axes import PLANNED
from fzero.collectives import gloo
from fzero.graph._ops import is_known_cheap, is_view, is_viewing, lays_out

__all__ = [
    "axis_of",
    "described",
    "elements",
    "full_bytes",
    "group_size",
    "is_cheap",
    "is_gather",
    "is_reduction",
    "is_wait",
    "reordered",
    "values",
    "wire",
]

# Reading a flat graph of aten operations: what communicates, and what may move.
#
# The graphs here are functional: no operation writes. The exceptions are `copy_`s and all_gathers into inputs, which
# donation adds, and all_reduces in place of values that nothing else reads. Nodes carry `meta["val"]`, stand-ins
# without memory of what they compute, and may carry `meta["unit"]`, whose collective it is, `meta["label"]`, an input's
# name, and `meta["kind"]`, what the input is. A value with `meta[LATE]` is made when it is used, not as soon as it can
# be. One with `meta[FUSED]` is computed by whatever compiled loop reads it, and one with `meta[COMPILED]` is such a
# loop itself.


aten: Any = torch.ops.aten

LATE, FUSED, COMPILED = "late", "fused", "compiled"
# a CPU's attention, which torch does not count, and the operation of a GPU that does the same work
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
WAIT = c10d.wait_tensor.default
GATHER_INTO = gloo.all_gather_into  # with a wait for each argument that it writes
GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default, GATHER_INTO)
REDUCTIONS = (
    c10d.reduce_scatter_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default,
    c10d.all_reduce_coalesced.default,
    c10d.all_reduce_.default,
    c10d.all_reduce_coalesced_.default,
)
EXCHANGES = (c10d.all_to_all_single.default, c10d.broadcast.default)
COPY = aten.copy_.default
SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
CASTS = (aten._to_copy.default, aten.to.dtype)


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return node.target is WAIT


def is_gather(node: Node) -> bool:
    """Return whether a node starts an all_gather."""
    return node.target in GATHERS


def is_reduction(node: Node) -> bool:
    """Return whether a node starts a reduce_scatter or an all_reduce."""
    return node.target in REDUCTIONS


def is_write(node: Node) -> bool:
    """Return whether a node writes into arguments."""
    return node.target is COPY or node.target is GATHER_INTO


def is_collective(node: Node) -> bool:
    """Return whether a node starts a collective."""
    return node.target in GATHERS or node.target in REDUCTIONS or is_exchange(node)


def is_exchange(node: Node) -> bool:
    """Return whether a node sends activations or other values from rank to rank: work, as far as its order goes."""
    return node.target in EXCHANGES


def is_input(node: Node) -> bool:
    """Return whether a node is an argument of the graph."""
    return node.op == "placeholder"


def results(graph: Graph) -> list[Any]:
    """List a graph's results: nodes, and None where the function returned none."""
    return list(next(n for n in reversed(graph.nodes) if n.op == "output").args[0])  # pyright: ignore[reportArgumentType]


def awaited(wait: Node) -> Node:
    """Return what a wait waits for: a collective or its item, of the turn before where it was carried on."""
    source = wait.all_input_nodes[0]
    return source.meta.get("carried", source)


def is_carried(node: Node) -> bool:
    """Return whether a node is a reduction that another turn of a loop has started."""
    return "carried" in node.meta


def start_of(wait: Node) -> Node:
    """Return the collective that a wait waits for."""
    return collective_of(awaited(wait))


def collective_of(source: Node) -> Node:
    """Return the collective of an item of it, or a collective itself."""
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def values(node: Node) -> list[torch.Tensor]:
    """List the (stand-in) tensors that a node computes."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return [val]
    return [x for x in val if isinstance(x, torch.Tensor)] if isinstance(val, tuple | list) else []


def values_of_args(node: Node) -> list[torch.Tensor]:
    """List the tensors that a node is given."""
    return [x for a in node.all_input_nodes for x in values(a)]


def shown(node: Node) -> str:
    """Say of what dtypes and shapes a node's tensors are: "float32[4, 8], int64[4]"."""
    return ", ".join([f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in values(node)])


def nbytes(*xs: torch.Tensor) -> int:
    """Count the bytes of tensors' elements."""
    return sum([x.numel() * x.element_size() for x in xs])


# ---------------------------------------------------------------- what may move


def users_through_views(node: Node) -> list[Node]:
    """List the nodes, other than views, that use a node or a view of it."""
    found = list(node.users)
    for user in found:  # grows as it goes
        found += list(user.users) if is_view(user) else []
    return [u for u in found if not is_view(u)]


def is_cheap(node: Node) -> bool:
    """Return whether a node may run wherever it suits memory: communication, movement of data, pointwise arithmetic."""
    return node.op == "call_function" and _is_cheap(node.target)


@functools.lru_cache(maxsize=4096)
def _is_cheap(operation: Any) -> bool:
    if operation is WAIT or operation in GATHERS or operation in REDUCTIONS or is_viewing(operation):
        return True
    if isinstance(operation, OpOverload) and operation.overloadpacket in flop_registry:
        return False
    if not isinstance(operation, OpOverload | OneNode):
        return False
    return is_known_cheap(operation)


def parameter_gathers(graph: Graph) -> list[Node]:
    """List the gathers whose operands depend on the graph's inputs alone: they may run at any time."""
    from_inputs: set[Node] = set()
    found = []
    for node in graph.nodes:
        known = all(a in from_inputs for a in node.all_input_nodes)
        if is_input(node) or (known and lays_out(node)):
            from_inputs.add(node)
        elif is_gather(node) and known:
            found.append(node)
    return found


def feeding_work(graph: Graph) -> set[Node]:
    """List all that is not cheap, such as matrix products, and what it depends on."""
    found: set[Node] = set()
    for n in reversed(graph.nodes):
        if n.op == "call_function" and not is_cheap(n):
            found.add(n)
        if n in found:
            found.update(n.all_input_nodes)
    return found


def collectives_before(nodes: Iterable[Node]) -> dict[Node, int]:
    """Count for each node the collectives that lie one behind the other before its result."""
    found: dict[Node, int] = {}
    for n in nodes:
        found[n] = max([found.get(a, 0) for a in n.all_input_nodes], default=0) + is_collective(n)
    return found


# ---------------------------------------------------------------- new graphs from old


def reordered(graph: Graph, order: Iterable[Node]) -> Graph:
    """Copy a graph with its nodes in another order, in which each follows what it is given."""
    return graph_of(order)


def copied(graph: Graph) -> Graph:
    """Copy a graph."""
    return reordered(graph, graph.nodes)


def sort(graph: Graph) -> Graph:
    """Copy a graph with every node after its arguments, else in the old order.

    What a node lacks comes right before it. To put the node off would let what waits for nothing, such as what is
    computed again for the backward pass, come long before it is used.
    """
    index = {n: i for i, n in enumerate(graph.nodes)}
    order: dict[Node, None] = dict.fromkeys(n for n in graph.nodes if is_input(n))
    for node in graph.nodes:
        stack = [node]
        while stack:
            missing = [a for a in stack[-1].all_input_nodes if a not in order]
            if missing:
                stack.append(min(missing, key=index.__getitem__))
            else:
                order[stack.pop()] = None
    return reordered(graph, order)


def after_needs(nodes: Sequence[Node], needs: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Put nodes in an order in which each follows its arguments, and what else it `needs`; else the order is the old.

    Args:
        nodes: all of a graph.
        needs: for some nodes others, that are no arguments of theirs.
    """
    index = {n: i for i, n in enumerate(nodes)}
    needed_by: dict[Node, list[Node]] = {}
    for n, others in needs.items():
        for other in others:
            needed_by.setdefault(other, []).append(n)
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
    """Count a node's floating-point operations: of matrix products, convolutions and attention; 0 for others."""
    packet = getattr(node.target, "overloadpacket", None)
    packet = ATTENTION.get(packet, packet)
    if packet not in flop_registry:
        return 0

    def val(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, Node) else x

    known = node.meta.get("flops", ())  # of this node, or of one that it is a copy of
    if known and known[0] is node.target:
        return known[1]
    args = map_arg(node.args, val)
    kwargs = map_arg(node.kwargs, val)
    found = int(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))
    node.meta["flops"] = (node.target, found)
    return found


def described(node: Node, same: Mapping[Node, Node]) -> tuple[str, str]:
    """Describe what a node computes, and of which values: nodes that compute the same have equal descriptions.

    Args:
        node: an operation.
        same: for nodes, another that computes the same and stands for them.
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
    """Describe a tensor as far as code compiled for it may depend on it."""
    if not isinstance(x, torch.Tensor):
        return (type(x),)
    return (tuple(x.shape), tuple(x.stride()), x.dtype, x.device)


# What a collective moves, as its node tells.


def group_size(node: Node) -> int:
    """Return the number of ranks that a collective tells of; 1 for an all_reduce, which does not tell."""
    if is_gather(node):
        return node.args[1]  # pyright: ignore[reportReturnType]
    sent, received = nbytes(*_operands(node)), nbytes(*values(node))
    return max(sent, received) // max(min(sent, received), 1)


def _operands(node: Node) -> list[torch.Tensor]:
    """List what a collective is given: its first argument, a tensor or several."""
    found: list[torch.Tensor] = []
    map_arg(node.args[0], lambda a: found.extend(values(a)))
    return found


def full_bytes(node: Node) -> int:
    """Count the bytes of a collective's full buffer; given a wait or an item, of what that waits for or is."""
    source = awaited(node) if is_wait(node) else node
    start = collective_of(source)
    if source is start and source is node:
        return _full(nbytes(*_operands(node)), nbytes(*values(node)), node)
    operands = start.args[0]  # of a coalesced collective a list, of which each item is one's
    operand = operands[source.args[1]] if isinstance(operands, list | tuple) else operands  # pyright: ignore
    return max(nbytes(*values(source)), nbytes(*values(operand)))  # pyright: ignore[reportArgumentType]


def elements(node: Node) -> int:
    """Count the elements that a collective moves: of the full buffer, an all_reduce's twice."""
    sent, received = (sum(x.numel() for x in xs) for xs in (_operands(node), values(node)))
    return 2 * sent if "all_reduce" in str(node.target) else _full(sent, received, node)


def _full(sent: int, received: int, node: Node) -> int:
    """Return the size of a collective's full buffer, padding included."""
    return sent * group_size(node) if is_gather(node) else max(sent, received)


def axis_of(node: Node, groups: Mapping[str, str] | None = None) -> str:
    """Return the axes that a collective runs over, joined by commas; "" for a group that is unknown.

    Args:
        node: the collective.
        groups: the axes of each process group, by its name; those of a planned world are known without.
    """
    for x in [*node.args, *node.kwargs.values()]:
        if isinstance(x, str) and (x.startswith(PLANNED) or x in (groups or {})):
            return x.removeprefix(PLANNED) if groups is None or x not in groups else groups[x]
    return ""


def wire(node: Node) -> str:
    """Return a collective's kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"."""
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "broadcast")
    return next((kind for kind in kinds if kind in str(node.target)), "all_reduce")
