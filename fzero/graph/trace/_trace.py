"""Trace a function of tensors as one flat, functional graph, and refuse code that a graph cannot hold."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero._notice import trouble_link
from fzero._torch import OpOverload, copy_nodes, is_accelerator
from fzero.collectives import record
from fzero.graph.ir import (
    METRIC,
    aten,
    collective_kind,
    is_collective,
    is_input,
    nbytes,
    node_stand_ins,
    signature,
    views_and_users,
)
from fzero.graph.loop import insert_loops
from fzero.graph.trace._replace_writes import replace_writes
from fzero.graph.trace._writes import check_gradients, check_writes, expose_batch_norm_writes, writes

__all__ = ["TracedGraph", "trace"]


_CAST = aten._to_copy.default


def _erase_round_trips(graph: Graph) -> None:
    """Replace a value that was cast to a wider dtype and back by the value itself.

    A half-precision shard whose gradient is summed in float32 is cast so: first to the gradient's dtype, then back for
    its gather. The second copy would be held until the backward pass, where the unit is gathered again.

    Args:
        graph: a traced graph without writes, which is changed.
    """
    for node in list(graph.nodes):
        wide = _cast_operand(node)
        source = None if wide is None else _cast_operand(wide)
        if source is None or wide is None or not _holds_all(wide.meta["val"].dtype, source.meta["val"].dtype):
            continue
        views, users = views_and_users(node)
        is_result = any(user.op == "output" for user in users)  # a result needs its own memory
        is_alike = signature(node.meta["val"]) == signature(source.meta["val"])
        if is_alike and not is_result and all(isinstance(view.target, OpOverload) for view in views):
            node.replace_all_uses_with(source)
            for view in views[1:]:  # they now lie in the source's memory
                args, kwargs = map_arg((view.args, view.kwargs), lambda a: a.meta["val"])
                view.meta["val"] = view.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    graph.eliminate_dead_code()


def _cast_operand(node: Node) -> Node | None:
    """Return the operand of a node that only casts it to another dtype; None for other nodes."""
    is_plain_cast = node.target is _CAST and {*node.kwargs} <= {"dtype"} and isinstance(node.args[0], Node)
    return node.all_input_nodes[0] if is_plain_cast else None


def _holds_all(target: torch.dtype, source: torch.dtype) -> bool:
    """Return whether `target` is another dtype than `source` and represents all its numbers.

    Torch promotes no float8, so a cast to float32 and back stays there.
    """
    if not (target.is_floating_point and source.is_floating_point) or min(target.itemsize, source.itemsize) == 1:
        return False
    return torch.promote_types(target, source) == target and target != source


_LARGE_BYTES = 1 << 20  # larger captured tensors cause a warning


class TracedGraph(NamedTuple):
    """A traced function: its graph, and the captured tensors and generators, which are the graph's last arguments."""

    graph: Graph
    constants: tuple[Any, ...]


def trace(f: Callable[..., Any], stand_ins: Sequence[torch.Tensor], labels: Sequence[dict[str, str]]) -> TracedGraph:
    """Record the operations that `f(*stand_ins)` runs.

    Args:
        f: a pure function that returns a flat list of tensors.
        stand_ins: stand-ins for its arguments, without memory.
        labels: each argument's `label`, `kind` and `block`, for the plan, for errors, and for the segments' borders.

    Raises:
        RuntimeError: if `f` reads the value of a tensor in Python, or writes into an argument. The message names the
            line.
        ValueError: if `f` captures a tensor that requires grad.
        NotScannableError: if a recorded loop returns more than sums and rows. Trace it again without loops.
    """

    def pure(*xs: torch.Tensor) -> Any:
        out = f(*xs)
        check_gradients(xs, labels)
        return out

    with record() as log, _explain_reads():
        gm = _torch.trace(pure, stand_ins)
    expose_batch_norm_writes(gm.graph)
    _check_constants(gm)
    check_writes(gm.graph, labels)
    writers = {n: into for n in gm.graph.nodes if (into := writes(n))}
    if writers and not replace_writes(gm.graph, writers):
        with _explain_reads():
            gm = _torch.functionalize(gm, stand_ins)
    _erase_round_trips(gm.graph)
    traced = _lift_constants(gm)
    for node, label in zip(traced.graph.nodes, labels, strict=False):
        node.meta.update(label)
    _name_collectives(traced.graph, log.events)
    _check_constant_tensors(traced)
    return traced._replace(graph=insert_loops(traced.graph))


@contextmanager
def _explain_reads() -> Iterator[None]:
    """Turn torch's error about a data-dependent value into one that says what to do."""
    try:
        yield
    except _torch.DataDependentError as error:
        where = f" at {error.line}" if error.line else ""
        raise RuntimeError(
            f"fzero.jit: the step reads the value of a tensor in Python ({error}){where}; a graph is traced before "
            "values are known. Use torch.where, keep it a tensor, or return it and read it there"
            + trouble_link("shapes-that-change")
        ) from error


def _check_constants(gm: GraphModule) -> None:
    """Check that the trace captured no value of another trace, since that value's operations would be lost.

    Raises:
        RuntimeError: if it did. The message names the line that uses the value.
    """
    for node in gm.graph.nodes:
        if node.op == "get_attr" and _torch.is_stand_in(getattr(gm, str(node.target))):
            line = next((_torch.node_line(user) for user in node.users), "")
            raise RuntimeError(
                f"fzero.jit: the step uses{f' at {line}' if line else ''} a value that another trace computed. If an "
                "earlier call stored it in an attribute or a global, pass it as an argument and return it as a result. "
                "If a differentiated function stored it, return it as aux. torch.func.linearize traces by itself: use "
                "torch.func.jvp. If a micro-batch stored it outside the step, where fzero.jit compares micro-batches, "
                "use loop=False"
            )


def _lift_constants(gm: GraphModule) -> TracedGraph:
    """Turn captured tensors and generators into arguments, after the others."""
    _place_constants(gm)
    constants: dict[str, Any] = {}
    graph = gm.graph
    first_operation = next(n for n in graph.nodes if not is_input(n) and n.op != "get_attr")
    example = next((x for n in graph.nodes for x in node_stand_ins(n) if n.op != "get_attr"), None)
    arguments: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        value = getattr(gm, name)
        key = _literal_key(node, value) or name
        if key not in arguments:
            with graph.inserting_before(first_operation):
                arguments[key] = graph.placeholder(name)
            is_tensor = isinstance(value, torch.Tensor)  # else a torch.Generator
            stand_in = _torch.stand_ins_like([value], example)[0] if is_tensor else None
            arguments[key].meta = {"val": stand_in, "label": f"captured {name}", "kind": "inputs"}
            constants[name] = value
        node.replace_all_uses_with(arguments[key])
        graph.erase_node(node)
    inputs = [n for n in graph.nodes if is_input(n)]
    return TracedGraph(copy_nodes([*inputs, *[n for n in graph.nodes if not is_input(n)]]), tuple(constants.values()))


def _place_constants(gm: GraphModule) -> None:
    """Place captured tensors on the accelerators that the step copies them to, since the host would wait for a copy."""
    for node in list(gm.graph.nodes):
        value = getattr(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            continue
        readers = [node, *[n for n in node.users if n.target is aten.lift_fresh_copy.default]]
        for copy in [n for reader in readers for n in reader.users if _is_move(n, value)]:
            device = copy.kwargs["device"]
            name = f"{node.target}_on_{device}".replace(":", "_")
            setattr(gm, name, value.to(device))
            with gm.graph.inserting_before(node):
                constant_node = gm.graph.get_attr(name)
            constant_node.meta = dict(copy.meta)
            copy.replace_all_uses_with(constant_node)
            gm.graph.erase_node(copy)


def _is_move(node: Node, value: torch.Tensor) -> bool:
    """Return whether a node copies a value to an accelerator, and changes nothing else."""
    if node.target is not aten._to_copy.default:
        return False
    device, *other_options = (node.kwargs.get(name) for name in ("device", "dtype", "layout", "memory_format"))
    is_same = all(x in (None, own) for x, own in zip(other_options, (value.dtype, value.layout, None), strict=True))
    return is_same and isinstance(device, torch.device) and is_accelerator(device)


def _literal_key(node: Node, value: Any) -> Hashable:
    """Return a key for a tensor that the step makes from numbers, as `torch.tensor(0.5)`; None for other tensors."""
    is_lifted = all(n.target is aten.lift_fresh_copy.default for n in node.users)
    if not is_lifted or not isinstance(value, torch.Tensor) or value.numel() > 1000:
        return None
    return value.dtype, value.device, tuple(value.shape), repr(value.tolist())


def _name_collectives(graph: Graph, events: Sequence[Any]) -> None:
    """Store in each collective's node the unit that it moves, from the recorder's events in the same order."""
    nodes = [n for n in graph.nodes if is_collective(n)]
    kinds = ["all_to_all" if e.kind == "ppermute" else e.kind for e in events]
    if kinds == [collective_kind(n) for n in nodes]:  # else some are the user's own, which are not recorded
        for node, event in zip(nodes, events, strict=True):
            node.meta["unit"] = event.unit or METRIC


def _check_constant_tensors(traced: TracedGraph) -> None:
    """Raise an error for a captured tensor that would never train, and warn of large ones."""
    names = [n.meta["label"] for n in traced.graph.nodes if is_input(n)][-len(traced.constants) :]
    for name, x in zip(names, traced.constants, strict=False):
        if not isinstance(x, torch.Tensor):
            continue
        user = next(iter(n for n in traced.graph.nodes if n.meta.get("label") == name)).users
        line = next((_torch.node_line(u) for u in user), "")
        text = f"the step captures a tensor {list(x.shape)} of {x.dtype}, used at {line}"
        if x.requires_grad or isinstance(x, torch.nn.Parameter):
            reason = "requires grad" if x.requires_grad else "is an nn.Parameter"
            raise ValueError(
                f"fzero.jit: {text}, that {reason}: it would be a constant and never train. Make it an argument "
                "(fzero.nn.functional takes the parameters out of a module), or detach it if it is a constant"
            )
        if nbytes(x) > _LARGE_BYTES:
            warnings.warn(
                f"fzero.jit: {text}: every rank holds its {nbytes(x):,} bytes as a constant; make it an argument",
                stacklevel=2,
            )
