"""Writes of a traced step: those into its own values become operations, and others are refused."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero._torch.levels import unwrapped
from fzero.graph._ir import aten, is_input, signature, values
from fzero.graph._ops import is_pointwise, is_random, is_view, name_of
from fzero.graph.loop._scan import is_part

__all__ = [
    "check_gradients",
    "check_writes",
    "other_memory",
    "refuse_writes_into",
    "say_what_is_written",
    "without_writes",
    "writes",
]

# What a traced step writes in place: its own values may be, arguments and captured tensors may not.
#
# Operations that write running statistics, which their schemas hide. No functional operation takes their place.
_HIDDEN = {"cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}
_HIDDEN |= {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}

PURE = "a step is pure: return the new value (x = x + 1, not x += 1)"


def say_what_is_written(graph: Graph) -> None:
    """Put in the place of `native_batch_norm`, whose schema hides that it writes its statistics, one that says so."""
    for node in graph.nodes:
        hides = name_of(node) == "native_batch_norm" and isinstance(node.args[3], Node) and node.args[5]
        if hides and str(node.target).endswith(".default"):
            node.target = torch.ops.aten._native_batch_norm_legit.default


def writes(node: Node) -> list[Node]:
    """List the arguments that a node writes into, those in lists too."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    found: list[Node] = []
    for i, a in enumerate(node.target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(a.name), found.append)
    return found


def check_writes(graph: Graph, labels: Sequence[dict[str, str]]) -> None:
    """Check that a traced step writes into nothing but values of its own, by operations that a graph can hold.

    Args:
        graph: as it was traced.
        labels: of each input, with its `label`.

    Raises:
        RuntimeError: if it does otherwise. Names the operation and its line.
    """
    for node in graph.nodes:
        _check_operation(node)
    inputs = zip((n for n in graph.nodes if is_input(n)), labels, strict=False)
    _refuse_writes(graph.nodes, {_torch.storage_id(node.meta["val"]): label["label"] for node, label in inputs})


def refuse_writes_into(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that what is traced now has written into none of these tensors, which are no arguments of it.

    Raises:
        RuntimeError: if it has. Names the tensor and the line.
    """
    _refuse_writes(_torch.recorded(), {_torch.storage_id(unwrapped(x)): name for name, x in named})


def other_memory(name: str) -> str:
    """Say what is wrong with a tensor that stands for other memory than before the step."""
    return f"fzero.jit: the step gives {name} other memory (x.data = y); a step is pure: return the new value"


def _refuse_writes(nodes: Iterable[Node], owners: dict[int, str]) -> None:
    """Refuse in-place writes into captured tensors, and into the memory that these names stand for."""
    for node in nodes:
        for x in writes(node):
            base = _base(x)
            known = isinstance(base.meta.get("val"), torch.Tensor)
            owner = owners.get(_torch.storage_id(base.meta["val"])) if known else None
            owner = "a captured tensor" if base.op == "get_attr" else owner
            if owner is not None:
                raise RuntimeError(f"fzero.jit: the step writes into {owner} in place {_where(node)}; {PURE}")


def _check_operation(node: Node) -> None:
    """Check that what an operation writes can be told, and done without."""
    if not isinstance(node.target, _torch.OpOverload):
        return
    if node.target.namespace == "c10d":
        raise RuntimeError(
            f"fzero.jit: the step calls torch.distributed {_where(node)}, whose collectives write in place and wait "
            "outside the graph: use fzero.collectives.psum, fzero.collectives.all_gather and the like"
        )
    if writes(node) and node.target.namespace != "aten":
        raise RuntimeError(
            f"fzero.jit: the step calls an operation of your own that writes into its arguments {_where(node)}, "
            "and a graph of values cannot hold it: make it one that returns new tensors"
        )
    if name_of(node) in _HIDDEN and _trains(node):
        raise RuntimeError(
            f"fzero.jit: the step runs a batch norm that writes running statistics behind torch's back {_where(node)}: "
            "switch it off (with torch.backends.cudnn.flags(enabled=False)), or keep statistics of your own"
        )


def _trains(node: Node) -> bool:
    """Return whether a batch norm is given running statistics to write into."""
    given = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}  # pyright: ignore
    given |= node.kwargs
    return isinstance(given.get("running_mean"), Node) and given.get("training", True) is True


def _where(node: Node) -> str:
    return f"({node.target}) at {_torch.line_of(node)}"


def _base(node: Node) -> Node:
    """Follow views to what they are views of; a literal, torch.tensor(3.0), is lifted: a fresh tensor."""
    while (is_view(node) or is_part(node)) and node.all_input_nodes and "lift_fresh" not in str(node.target):
        node = node.all_input_nodes[0]
    return node


def check_gradients(inputs: Sequence[Any], labels: Sequence[dict[str, str]]) -> None:
    """Check that a step has left no gradient in its arguments.

    Raises:
        RuntimeError: if one has a `.grad` now.
    """
    for x, label in zip(inputs, labels, strict=True):
        if x.grad is not None:
            raise RuntimeError(
                f"fzero.jit: the step writes into {label['label']}, its .grad; {PURE}. Take gradients with "
                "fzero.value_and_grad or torch.autograd.grad, or of a copy: w = w.detach().requires_grad_()"
            )


# Writes of a trace into fresh memory that nothing views, replaced one by one by operations that make new values.
#
# `torch.func.functionalize` replaces any write, but traces the whole step again for it. Autograd's own formulas, such
# as that of `silu`, write into what they have just made: these need no second trace.


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
