"""In-place writes of a traced step are refused where they reach a value that the step does not own."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero._torch.levels import unwrap
from fzero.graph.ir import is_input, is_view, op_name
from fzero.graph.loop import is_loop_slice

__all__ = [
    "check_gradients",
    "check_writes",
    "expose_batch_norm_writes",
    "other_memory",
    "refuse_writes_into",
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
        hides_writes = op_name(node) == "native_batch_norm" and isinstance(node.args[3], Node) and node.args[5]
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
            base = _view_base(x)
            is_tensor = isinstance(base.meta.get("val"), torch.Tensor)
            label = labels.get(_torch.storage_id(base.meta["val"])) if is_tensor else None
            label = "a captured tensor" if base.op == "get_attr" else label
            if label is not None:
                raise RuntimeError(
                    f"fzero.jit: the step writes into {label} in place {_target_and_line(node)}; {_PURE}"
                )


def _check_operation(node: Node) -> None:
    """Check that an operation's writes are visible in its schema, and that a pure operation can replace it."""
    if not isinstance(node.target, _torch.OpOverload):
        return
    if node.target.namespace == "c10d":
        raise RuntimeError(
            f"fzero.jit: the step calls torch.distributed {_target_and_line(node)}, whose collectives write in place "
            "and wait outside the graph: use fzero.collectives.psum, fzero.collectives.all_gather and the like"
        )
    if writes(node) and node.target.namespace != "aten":
        raise RuntimeError(
            f"fzero.jit: the step calls a custom operation that writes into its arguments {_target_and_line(node)}, "
            "and a graph of values cannot hold it: change it to return new tensors"
        )
    if op_name(node) in _HIDDEN and _updates_statistics(node):
        raise RuntimeError(
            "fzero.jit: the step runs a batch norm that writes running statistics behind torch's back "
            f"{_target_and_line(node)}: switch it off (with torch.backends.cudnn.flags(enabled=False)), "
            "or compute the statistics yourself"
        )


def _updates_statistics(node: Node) -> bool:
    """Return whether a batch norm updates running statistics."""
    arguments = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}  # pyright: ignore
    arguments |= node.kwargs
    return isinstance(arguments.get("running_mean"), Node) and arguments.get("training", True) is True


def _target_and_line(node: Node) -> str:
    return f"({node.target}) at {_torch.node_line(node)}"


def _view_base(node: Node) -> Node:
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
