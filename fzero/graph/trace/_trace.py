"""Trace a function of tensors as one flat, functional graph, with an error for what a graph cannot hold."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fzero import _torch
from fzero._notice import see
from fzero._torch import OpOverload
from fzero.collectives import record
from fzero.graph._ir import aten, is_collective, is_input, nbytes, reordered, signature, values, wire
from fzero.graph.loop._trace import with_loops
from fzero.graph.passes._uses import family
from fzero.graph.trace._writes import check_gradients, check_writes, say_what_is_written, without_writes, writes

__all__ = ["Traced", "trace", "without_round_trips"]

# Casts to a wider dtype and back, which give the value itself.


CAST = aten._to_copy.default


def without_round_trips(graph: Graph) -> None:
    """Use a value itself where it was cast to a dtype that holds all of its own, and back.

    A half-precision shard whose gradient is summed in float32 is cast so: first for the gradient's dtype, then for its
    gather. The second copy would wait for the backward pass, where the unit is gathered again.

    Args:
        graph: a traced graph without writes, which is changed.
    """
    for node in list(graph.nodes):
        wide = _cast(node)
        source = None if wide is None else _cast(wide)
        if source is None or wide is None or not _holds_all(wide.meta["val"].dtype, source.meta["val"].dtype):
            continue
        views, users = family(node)
        handed_on = any(user.op == "output" for user in users)  # a result has memory of its own
        same = signature(node.meta["val"]) == signature(source.meta["val"])
        if same and not handed_on and all(isinstance(view.target, OpOverload) for view in views):
            node.replace_all_uses_with(source)
            for view in views[1:]:  # which now lie in other memory
                args, kwargs = map_arg((view.args, view.kwargs), lambda a: a.meta["val"])
                view.meta["val"] = view.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    graph.eliminate_dead_code()


def _cast(node: Node) -> Node | None:
    """Return what a node casts to another dtype, if it does no more than that."""
    plain = node.target is CAST and {*node.kwargs} <= {"dtype"} and isinstance(node.args[0], Node)
    return node.all_input_nodes[0] if plain else None  # a number stands for itself


def _holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether each number of one dtype is one of another's."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    return torch.promote_types(wide, narrow) == wide and wide != narrow


# trace: a function of tensors as one flat, functional graph, and errors for what a graph cannot hold.


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
        NotScannable: if what is to become a loop hands on more than sums and rows. Record it without loops.
    """

    def pure(*xs: torch.Tensor) -> Any:
        out = f(*xs)
        check_gradients(xs, labels)
        return out

    with record() as log, _explained():
        gm = _torch.trace(pure, fakes)
    say_what_is_written(gm.graph)
    _check_constants(gm)
    check_writes(gm.graph, labels)
    written = {n: into for n in gm.graph.nodes if (into := writes(n))}
    if written and not without_writes(gm.graph, written):
        with _explained():
            gm = _torch.functional(gm, fakes)
    without_round_trips(gm.graph)
    traced = _lift_constants(gm)
    for node, label in zip(traced.graph.nodes, labels, strict=False):
        node.meta.update(label)
    _name_collectives(traced.graph, log.order)
    _check_captured(traced)
    return traced._replace(graph=with_loops(traced.graph))


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where a step reads the value of a tensor."""
    try:
        yield
    except _torch.DataDependentError as error:
        where = f" at {error.line}" if error.line else ""
        raise RuntimeError(
            f"fzero.jit: the step reads the value of a tensor in Python ({error}){where}; a graph is traced before "
            "values are known. Use torch.where, keep it a tensor, or return it and read it there"
            + see("shapes-that-change")
        ) from error


def _check_constants(gm: GraphModule) -> None:
    """Check that the trace captured no value of a trace: its operations would be lost.

    Raises:
        RuntimeError: if it did. Names the line that uses it.
    """
    for node in gm.graph.nodes:
        if node.op == "get_attr" and _torch.is_fake(getattr(gm, str(node.target))):
            line = next((_torch.line_of(user) for user in node.users), "")
            raise RuntimeError(
                f"fzero.jit: the step uses{f' at {line}' if line else ''} a value that another trace computed: one "
                "that an earlier call kept (in an attribute or a global), which belongs among arguments and results; "
                "one that a differentiated function left behind, which belongs among its aux; one within "
                "torch.func.linearize, which traces by itself: use torch.func.jvp; or one that a micro-batch left "
                "outside of the step, where fzero.jit looks whether micro-batches are alike: use loop=False"
            )


def _lift_constants(gm: GraphModule) -> Traced:
    """Turn captured tensors into arguments that follow the others."""
    constants: dict[str, Any] = {}
    graph = gm.graph
    first = next(n for n in graph.nodes if not is_input(n))
    beside = next((x for n in graph.nodes for x in values(n) if n.op != "get_attr"), None)
    lifted: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        value = getattr(gm, name)
        what = _literal(node, value) or name
        if what not in lifted:
            with graph.inserting_before(first):
                lifted[what] = graph.placeholder(name)
            tensor = isinstance(value, torch.Tensor)  # else a torch.Generator
            fake = _torch.fake_like([value], beside)[0] if tensor else None
            lifted[what].meta = {"val": fake, "label": f"captured {name}", "kind": "inputs"}
            constants[name] = value
        node.replace_all_uses_with(lifted[what])
        graph.erase_node(node)
    inputs = [n for n in graph.nodes if is_input(n)]
    return Traced(reordered(graph, [*inputs, *[n for n in graph.nodes if not is_input(n)]]), tuple(constants.values()))


def _literal(node: Node, value: Any) -> Hashable:
    """Describe a tensor that the step makes of numbers, as `torch.tensor(0.5)`; None if it is not such a one."""
    fresh = all(n.target is aten.lift_fresh_copy.default for n in node.users)
    if not fresh or not isinstance(value, torch.Tensor) or value.numel() > 1000:
        return None
    return value.dtype, value.device, tuple(value.shape), repr(value.tolist())


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
