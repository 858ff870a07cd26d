"""In-place writes of a traced step: writes into its own values become pure operations, others are refused."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero._torch.levels import unwrap
from fzero.graph.ir import aten, is_input, is_pointwise, is_random, is_view, name_of, signature, stand_ins_of
from fzero.graph.loop._loop_marks import is_loop_slice

__all__ = [
    "check_gradients",
    "check_writes",
    "expose_batch_norm_writes",
    "other_memory",
    "refuse_writes_into",
    "replace_writes",
    "writes",
]

# A traced step may write into its own values in place, but not into arguments and captured tensors.
#
# The schemas of these operations hide that they write running statistics. They have no functional counterparts.
_HIDDEN = {"cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}
_HIDDEN |= {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}

_PURE = "a step is pure: return the new value (x = x + 1, not x += 1)"


def expose_batch_norm_writes(graph: Graph) -> None:
    """Replace `native_batch_norm`, whose schema hides its writes, by an operation whose schema shows them."""
    for node in graph.nodes:
        hides_writes = name_of(node) == "native_batch_norm" and isinstance(node.args[3], Node) and node.args[5]
        if hides_writes and str(node.target).endswith(".default"):
            node.target = torch.ops.aten._native_batch_norm_legit.default


def writes(node: Node) -> list[Node]:
    """List the arguments that a node writes into, also those in lists."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    targets: list[Node] = []
    for i, a in enumerate(node.target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(a.name), targets.append)
    return targets


def check_writes(graph: Graph, labels: Sequence[dict[str, str]]) -> None:
    """Check that a traced step writes only into its own values, by operations that a graph can hold.

    Args:
        graph: the traced graph.
        labels: for each input a mapping with its `label`.

    Raises:
        RuntimeError: if another write occurs. The message names the operation and its line.
    """
    for node in graph.nodes:
        _check_operation(node)
    inputs = zip((n for n in graph.nodes if is_input(n)), labels, strict=False)
    _refuse_writes(graph.nodes, {_torch.storage_id(node.meta["val"]): label["label"] for node, label in inputs})


def refuse_writes_into(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that the running trace has not written into these tensors, which are not among its arguments.

    Raises:
        RuntimeError: if it has. The message names the tensor and the line.
    """
    _refuse_writes(_torch.recorded_nodes(), {_torch.storage_id(unwrap(x)): name for name, x in named_tensors})


def other_memory(name: str) -> str:
    """Return the error message for a tensor whose memory the step has replaced."""
    return f"fzero.jit: the step gives {name} other memory (x.data = y); a step is pure: return the new value"


def _refuse_writes(nodes: Iterable[Node], labels: dict[int, str]) -> None:
    """Refuse in-place writes into captured tensors, and into memory that has a label."""
    for node in nodes:
        for x in writes(node):
            base = _base(x)
            is_tensor = isinstance(base.meta.get("val"), torch.Tensor)
            label = labels.get(_torch.storage_id(base.meta["val"])) if is_tensor else None
            label = "a captured tensor" if base.op == "get_attr" else label
            if label is not None:
                raise RuntimeError(f"fzero.jit: the step writes into {label} in place {_where(node)}; {_PURE}")


def _check_operation(node: Node) -> None:
    """Check that an operation's writes are visible in its schema, and that a pure operation can replace it."""
    if not isinstance(node.target, _torch.OpOverload):
        return
    if node.target.namespace == "c10d":
        raise RuntimeError(
            f"fzero.jit: the step calls torch.distributed {_where(node)}, whose collectives write in place and wait "
            "outside the graph: use fzero.collectives.psum, fzero.collectives.all_gather and the like"
        )
    if writes(node) and node.target.namespace != "aten":
        raise RuntimeError(
            f"fzero.jit: the step calls a custom operation that writes into its arguments {_where(node)}, "
            "and a graph of values cannot hold it: change it to return new tensors"
        )
    if name_of(node) in _HIDDEN and _trains(node):
        raise RuntimeError(
            f"fzero.jit: the step runs a batch norm that writes running statistics behind torch's back {_where(node)}: "
            "switch it off (with torch.backends.cudnn.flags(enabled=False)), or compute the statistics yourself"
        )


def _trains(node: Node) -> bool:
    """Return whether a batch norm updates running statistics."""
    arguments = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}  # pyright: ignore
    arguments |= node.kwargs
    return isinstance(arguments.get("running_mean"), Node) and arguments.get("training", True) is True


def _where(node: Node) -> str:
    return f"({node.target}) at {_torch.line_of(node)}"


def _base(node: Node) -> Node:
    """Follow views to their base; stop at a lifted literal, such as torch.tensor(3.0), which is a fresh tensor."""
    while (is_view(node) or is_loop_slice(node)) and node.all_input_nodes and "lift_fresh" not in str(node.target):
        node = node.all_input_nodes[0]
    return node


def check_gradients(inputs: Sequence[Any], labels: Sequence[dict[str, str]]) -> None:
    """Check that a step has left no gradient in its arguments.

    Raises:
        RuntimeError: if an argument has a `.grad` now. The message names the argument.
    """
    for x, label in zip(inputs, labels, strict=True):
        if x.grad is not None:
            raise RuntimeError(
                f"fzero.jit: the step writes into {label['label']}, its .grad; {_PURE}. Take gradients with "
                "fzero.value_and_grad or torch.autograd.grad, or of a copy: w = w.detach().requires_grad_()"
            )


# Replace writes into fresh memory without views, one by one, by operations that return new values.
#
# `torch.func.functionalize` replaces any write, but needs a second trace of the whole step. Autograd's own formulas,
# such as that of `silu`, write into tensors that they have just made, and need no second trace.


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
    memory = {n: [_torch.storage_id(x) for x in stand_ins_of(n)] for n in graph.nodes if n.op != "output"}
    written_memory = {s for node in writers for a in (node, *writers[node]) for s in memory[a]}
    replacements: dict[Node, _Replacement] = {}
    for n in memory:
        if n in writers:
            replacement = _replacement(n, writers[n])
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
                replacing = graph.create_node("call_function", operation, node.args, node.kwargs, name_of(node)[:-1])
            replacing.meta = {**node.meta, "val": val}
            memory[replacing], latest[memory[node][0]] = memory[node], replacing
    for node in reversed(replacements):
        graph.erase_node(node)
    return True


def _is_fresh(node: Node, memory: Mapping[Node, Sequence[int]]) -> bool:
    """Return whether a node computes one tensor in new memory."""
    operand_memory = {s for a in node.all_input_nodes for s in memory[a]}
    return node.op == "call_function" and len(memory[node]) == 1 and memory[node][0] not in operand_memory


def _replacement(node: Node, into: Sequence[Node]) -> _Replacement | None:
    """Return the pure counterpart of a node's write, such as `add` for `add_`; None if it has none of the same form."""
    name, target = name_of(node), node.target
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
