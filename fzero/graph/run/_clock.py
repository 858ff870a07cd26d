"""Clocks: the time of each operation of a graph, while a caller records it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Interpreter, Node

from fzero._torch import is_backward, node_line, node_stack, wait_for_device
from fzero._torch.watched import without_watchers
from fzero.graph.ir import flops
from fzero.graph.loop import node_loop
from fzero.graph.planning import find_phases

__all__ = [
    "COMPILED",
    "TimedOperation",
    "current_recorder",
    "profiler_name",
    "record_operations",
    "record_time",
    "segment_source",
    "timed_graph",
]

COMPILED = "compiled code"


class TimedOperation(NamedTuple):
    """An operation that ran.

    Attributes:
        name: such as "aten::mm", or "compiled code".
        line: the user's source line, as "file:line"; "" if there is none.
        phase: the phase of the step, such as "backward"; "" if it is unknown.
        seconds: the operation's duration.
        stack: the functions and modules that it runs in, the outermost first; () if they are unknown.
    """

    name: str
    line: str
    phase: str
    seconds: float
    stack: tuple[str, ...] = ()


_RECORDER: ContextVar[Callable[[TimedOperation], None] | None] = ContextVar("recorder", default=None)


@contextmanager
def record_operations(note: Callable[[TimedOperation], None]) -> Iterator[None]:
    """Call `note` with each operation of the graphs that run within the context, and its time."""
    token = _RECORDER.set(note)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def current_recorder() -> Callable[[TimedOperation], None] | None:
    """Return the function that records operations, or None."""
    return _RECORDER.get()


def record_time(
    note: Callable[[TimedOperation], None],
    name: str,
    line: str,
    phase: str,
    stack: tuple[str, ...],
    f: Callable[[], Any],
) -> Any:
    """Call a function, and record its time."""
    with without_watchers():
        start = time.perf_counter()
        out = f()
        wait_for_device()
        seconds = time.perf_counter() - start
    note(TimedOperation(name, line=line, phase=phase, seconds=seconds, stack=stack))
    return out


class _TimedInterpreter(Interpreter):
    """Runs a graph one operation at a time, and records the time of each. A loop records its body's operations."""

    def __init__(self, module: GraphModule, phase_of: dict[str, str], loops: set[str]) -> None:
        super().__init__(module)
        self.phase_of, self.loops = phase_of, loops

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        note = current_recorder()
        if note is None or n.op != "call_function" or n.name in self.loops:
            return super().run_node(n)
        plain, phase = super().run_node, self.phase_of.get(n.name, "")
        return record_time(
            note, name=profiler_name(n.target), line=node_line(n), phase=phase, stack=node_stack(n), f=lambda: plain(n)
        )


def timed_graph(module: GraphModule, source: Graph) -> Callable[..., Any]:
    """Return a function that runs a graph, and records the time of each operation.

    Args:
        module: the graph to run.
        source: the graph that `module` is a copy of, node by node.
    """
    phase_of = find_phases(source)
    pairs = list(zip(source.nodes, module.graph.nodes, strict=True))
    loops = {copy.name for n, copy in pairs if node_loop(n)}
    return _TimedInterpreter(module, {copy.name: phase_of.get(n, "") for n, copy in pairs}, loops).run


def segment_source(graph: Graph) -> tuple[str, str, tuple[str, ...]]:
    """Return the line of a segment's most costly operation, the segment's phase ("backward" or ""), and its stack."""
    work = [n for n in graph.nodes if n.op == "call_function"]
    costliest = max(work, key=flops, default=None)
    phase = "backward" if any(is_backward(n) for n in work) else ""
    return ("", phase, ()) if costliest is None else (node_line(costliest), phase, node_stack(costliest))


def profiler_name(target: Any) -> str:
    """Return the name of an operation in torch's profiler."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else getattr(target, "__name__", str(target))
