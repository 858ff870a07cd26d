"""Writes of a trace into fresh memory that nothing views, replaced one by one by operations that make new values.

`torch.func.functionalize` replaces any write, but traces the whole step again for it. Autograd's own formulas, such as
that of `silu`, write into what they have just made: these need no second trace.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero.graph.ir import aten, signature, values
from fzero.graph.ops import is_pointwise, is_random, name_of

__all__ = ["without_writes"]


class _New(NamedTuple):
    """What takes a write's place: an operation, and a stand-in of its result."""

    operation: Any
    val: torch.Tensor


def without_writes(graph: Graph, written: Mapping[Node, Sequence[Node]]) -> bool:
    """Replace the writes of a graph, if each is an operation by element on fresh memory that nothing views.

    Args:
        graph: a traced graph, which is changed.
        written: its nodes that write, each with the arguments that it writes into.

    Returns:
        Whether they are replaced. If not, the graph is as it was.
    """
    memory = {n: [_torch.storage_id(x) for x in values(n)] for n in graph.nodes if n.op != "output"}
    theirs = {s for node in written for a in (node, *written[node]) for s in memory[a]}
    new: dict[Node, _New] = {}
    for n in memory:
        if n in written:
            found = _replacement(n, written[n])
            if found is None:
                return False
            new[n] = found
        elif theirs.intersection(memory[n]) and not _is_fresh(n, memory):
            return False
    now: dict[int, Node] = {}  # the node whose value lies in the memory
    for node in list(graph.nodes):
        for a in node.all_input_nodes:
            if len(memory[a]) == 1 and (last := now.get(memory[a][0], a)) is not a:
                node.replace_input_with(a, last)
        if node in new:
            operation, val = new[node]
            with graph.inserting_before(node):
                made = graph.create_node("call_function", operation, node.args, node.kwargs, name_of(node)[:-1])
            made.meta = {**node.meta, "val": val}
            memory[made], now[memory[node][0]] = memory[node], made
    for node in reversed(new):
        graph.erase_node(node)
    return True


def _is_fresh(node: Node, memory: Mapping[Node, Sequence[int]]) -> bool:
    """Return whether a node computes one tensor in memory of its own."""
    lent = {s for a in node.all_input_nodes for s in memory[a]}
    return node.op == "call_function" and len(memory[node]) == 1 and memory[node][0] not in lent


def _replacement(node: Node, into: Sequence[Node]) -> _New | None:
    """Find the operation that makes a new value of what a node writes, `add` of `add_`, if it makes just that."""
    name, target = name_of(node), node.target
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and [*into] == [node.args[0]] else None
    if packet is None or not isinstance(target, _torch.OpOverload) or is_random(node):
        return None
    if not is_pointwise(node) and name != "fill_":  # which torch does not call so
        return None
    operation = getattr(packet, target._overloadname, None)
    if operation is None or _takes(operation) != _takes(target):
        return None
    args: Any = map_arg(node.args, lambda a: a.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda a: a.meta["val"])
    val = operation(*args, **kwargs)
    return _New(operation, val) if signature(val) == signature(node.meta["val"]) else None


def _takes(operation: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in operation._schema.arguments]
