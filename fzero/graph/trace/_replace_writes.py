"""Writes into fresh memory without views become, one by one, operations that return new values."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero.graph.ir import aten, is_pointwise, is_random, node_stand_ins, op_name, signature

__all__ = ["replace_writes"]


class _Replacement(NamedTuple):
    """The replacement of a write: a pure operation, and a stand-in of its result."""

    operation: Any
    val: torch.Tensor


def replace_writes(graph: Graph, writers: Mapping[Node, Sequence[Node]]) -> bool:
    """Replace the writes of a graph, if each is an elementwise operation on fresh memory without views.

    Args:
        graph: a traced graph, which is changed.
        writers: the nodes that write, each with the arguments that it writes into.

    Returns:
        Whether the writes were replaced. If not, the graph is unchanged.
    """
    memory = {n: [_torch.storage_id(x) for x in node_stand_ins(n)] for n in graph.nodes if n.op != "output"}
    written_memory = {s for node in writers for a in (node, *writers[node]) for s in memory[a]}
    replacements: dict[Node, _Replacement] = {}
    for n in memory:
        if n in writers:
            replacement = _pure_counterpart(n, writers[n])
            if replacement is None:
                return False
            replacements[n] = replacement
        elif written_memory.intersection(memory[n]) and not _is_fresh(n, memory):
            return False
    latest: dict[int, Node] = {}  # for each memory, the node whose value it holds
    for node in list(graph.nodes):
        for a in node.all_input_nodes:
            if len(memory[a]) == 1 and (last := latest.get(memory[a][0], a)) is not a:
                node.replace_input_with(a, last)
        if node in replacements:
            operation, val = replacements[node]
            with graph.inserting_before(node):
                replacing = graph.create_node("call_function", operation, node.args, node.kwargs, op_name(node)[:-1])
            replacing.meta = {**node.meta, "val": val}
            memory[replacing], latest[memory[node][0]] = memory[node], replacing
    for node in reversed(replacements):
        graph.erase_node(node)
    return True


def _is_fresh(node: Node, memory: Mapping[Node, Sequence[int]]) -> bool:
    """Return whether a node computes one tensor in new memory."""
    operand_memory = {s for a in node.all_input_nodes for s in memory[a]}
    return node.op == "call_function" and len(memory[node]) == 1 and memory[node][0] not in operand_memory


def _pure_counterpart(node: Node, into: Sequence[Node]) -> _Replacement | None:
    """Return the pure counterpart of a node's write, such as `add` for `add_`; None if it has none of the same form."""
    name, target = op_name(node), node.target
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and [*into] == [node.args[0]] else None
    if packet is None or not isinstance(target, _torch.OpOverload) or is_random(node):
        return None
    if not is_pointwise(node) and name != "fill_":  # torch does not tag fill_ as pointwise
        return None
    operation = getattr(packet, target._overloadname, None)
    if operation is None or _parameters_of(operation) != _parameters_of(target):
        return None
    args: Any = map_arg(node.args, lambda a: a.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda a: a.meta["val"])
    val = operation(*args, **kwargs)
    return _Replacement(operation, val) if signature(val) == signature(node.meta["val"]) else None


def _parameters_of(operation: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in operation._schema.arguments]
