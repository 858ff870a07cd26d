"""trace: a function of tensors as one flat, functional graph, and errors for what a graph cannot hold."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fzero import _torch
from fzero._torch.levels import unwrapped
from fzero.collectives import _record
from fzero.graph._wire import wire
from fzero.graph.ir import is_collective, is_input, nbytes, reordered, values
from fzero.graph.ops import is_view, name_of

__all__ = ["Traced", "other_memory", "refuse_writes_into", "trace"]

LARGE = 1 << 20  # bytes of a captured tensor from which on it is worth a warning


class Traced(NamedTuple):
    """A traced function: its graph, and what it captured (tensors, generators), which the graph takes as arguments."""

    graph: Graph
    constants: tuple[Any, ...]


def trace(f: Callable[..., Any], fakes: Sequence[torch.Tensor], labels: Sequence[dict[str, str]]) -> Traced:
    """Record what `f(*fakes)`, a function to a flat list of tensors, runs.

    Args:
        f: a pure function.
        fakes: stand-ins of its arguments, without memory.
        labels: of each argument its `label`, `kind` and `block`, for the plan, for errors, and for where to cut.

    Raises:
        RuntimeError: if `f` reads the value of a tensor in Python, or writes into an argument. Names the line.
        ValueError: if `f` captures a tensor that requires grad.
    """

    def kept(*xs: torch.Tensor) -> Any:
        before = [_torch.storage_id(x) for x in xs]
        out = f(*xs)
        for x, storage, label in zip(xs, before, labels, strict=False):
            if _torch.storage_id(x) != storage:
                raise RuntimeError(other_memory(label["label"]))
        return out

    with _record.record() as log:
        try:
            gm = _torch.trace(kept, fakes)
        except _torch.DataDependentError as error:
            raise RuntimeError(
                f"fzero.jit: the step reads the value of a tensor in Python ({error}) at {error.line}; a graph is "
                "traced before values are known. Use torch.where, keep it a tensor, or return it and read it there"
            ) from error
    _say_what_is_written(gm.graph)
    _check_writes(gm.graph, labels)
    if any(_written(n) for n in gm.graph.nodes):
        gm = _torch.functional(gm, fakes)
    gm.graph.eliminate_dead_code()
    traced = _lift_constants(gm)
    for node, label in zip(traced.graph.nodes, labels, strict=False):
        node.meta.update(label)
    _name_collectives(traced.graph, log.order)
    _check_captured(traced)
    return traced


def _say_what_is_written(graph: Graph) -> None:
    """Put in the place of `native_batch_norm`, whose schema hides that it writes its statistics, one that says so."""
    for node in graph.nodes:
        writes = name_of(node) == "native_batch_norm" and isinstance(node.args[3], Node) and node.args[5]
        if writes and str(node.target).endswith(".default"):
            node.target = torch.ops.aten._native_batch_norm_legit.default


def _written(node: Node) -> list[Node]:
    """List the arguments that a node writes into."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    found = []
    for i, a in enumerate(node.target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            x = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            found += [y for y in (x if isinstance(x, list | tuple) else [x]) if isinstance(y, Node)]
    return found


def _check_writes(graph: Graph, labels: Sequence[dict[str, str]]) -> None:
    inputs = zip((n for n in graph.nodes if is_input(n)), labels, strict=False)
    _refuse_writes(graph.nodes, {_torch.storage_id(node.meta["val"]): label["label"] for node, label in inputs})


def other_memory(name: str) -> str:
    """Say what is wrong with a tensor that stands for other memory than before the step."""
    return f"fzero.jit: the step gives {name} other memory (x.data = y); a step is pure: return the new value"


def refuse_writes_into(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that what is traced now has written into none of these tensors, which are no arguments of it.

    Raises:
        RuntimeError: if it has. Names the tensor and the line.
    """
    _refuse_writes(_torch.recorded(), {_torch.storage_id(unwrapped(x)): name for name, x in named})


def _refuse_writes(nodes: Iterable[Node], storage: dict[int, str]) -> None:
    """Refuse in-place writes into captured tensors, and into the memory that these names stand for."""
    for node in nodes:
        for x in _written(node):
            base = _base(x)
            known = isinstance(base.meta.get("val"), torch.Tensor)
            label = storage.get(_torch.storage_id(base.meta["val"])) if known else None
            label = "a captured tensor" if base.op == "get_attr" else label
            if label is not None:
                raise RuntimeError(
                    f"fzero.jit: the step writes into {label} in place ({node.target}) at {_torch.line_of(node)}; a "
                    "step is pure: return the new value (x = x + 1, not x += 1)"
                )


def _base(node: Node) -> Node:
    """Follow views to what they are views of; a literal, torch.tensor(3.0), is lifted: a fresh tensor."""
    while is_view(node) and node.all_input_nodes and "lift_fresh" not in str(node.target):
        node = node.all_input_nodes[0]
    return node


def _lift_constants(gm: GraphModule) -> Traced:
    """Turn captured tensors into arguments that follow the others."""
    constants: dict[str, Any] = {}
    graph = gm.graph
    first = next(n for n in graph.nodes if not is_input(n))
    beside = next((x for n in graph.nodes for x in values(n) if n.op != "get_attr"), None)
    lifted: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        value = getattr(gm, name)
        if name not in lifted:
            with graph.inserting_before(first):
                lifted[name] = graph.placeholder(name)
            tensor = isinstance(value, torch.Tensor)  # else a torch.Generator
            fake = _torch.fake_like([value], beside)[0] if tensor else None
            lifted[name].meta = {"val": fake, "label": f"captured {name}", "kind": "inputs"}
            constants[name] = value
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    inputs = [n for n in graph.nodes if is_input(n)]
    return Traced(reordered(graph, [*inputs, *[n for n in graph.nodes if not is_input(n)]]), tuple(constants.values()))


def _name_collectives(graph: Graph, events: Sequence[Any]) -> None:
    """Note on each collective whose unit it moves, as the recorder saw them, one after the other."""
    nodes = [n for n in graph.nodes if is_collective(n)]
    kinds = ["all_to_all" if e.kind == "ppermute" else e.kind for e in events]
    if kinds == [wire(n) for n in nodes]:  # else some are the user's own
        for node, event in zip(nodes, events, strict=True):
            node.meta["unit"] = event.unit or "(metric)"


def _check_captured(traced: Traced) -> None:
    names = [n.meta["label"] for n in traced.graph.nodes if is_input(n)][-len(traced.constants) :]
    for name, x in zip(names, traced.constants, strict=False):
        if not isinstance(x, torch.Tensor):
            continue
        user = next(iter(n for n in traced.graph.nodes if n.meta.get("label") == name)).users
        line = next((_torch.line_of(u) for u in user), "")
        what = f"the step captures a tensor {list(x.shape)} of {x.dtype}, used at {line}"
        if x.requires_grad or isinstance(x, torch.nn.Parameter):
            why = "requires grad" if x.requires_grad else "is an nn.Parameter"
            raise ValueError(
                f"fzero.jit: {what}, that {why}: it would be a constant and never train. Make it an argument "
                "(fzero.nn.functional takes the parameters out of a module), or, if it is meant to be one, detach it"
            )
        if nbytes(x) > LARGE:
            warnings.warn(
                f"fzero.jit: {what}: {nbytes(x):,} bytes that every rank holds whole, as a constant; "
                "make it an argument",
                stacklevel=2,
            )
