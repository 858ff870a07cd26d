"""Executors: three ways to run a scheduled graph, each in exactly its order."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from fzero._torch import inductor, line_of, profiling
from fzero.collectives.gloo import INSTEAD
from fzero.graph.ir import copied, is_input
from fzero.graph.loops import Loop, loop_of
from fzero.graph.run._loop import running
from fzero.graph.run._program import program_of
from fzero.graph.run._segment import Segment

__all__ = ["BACKENDS", "Executable", "lower"]

Runs = Callable[[list[Any]], Sequence[Any]]  # a function of a list of arguments, which it empties, to results


@dataclass(frozen=True)
class Executable:
    """A scheduled graph that can run: a function of the list of its arguments, which it empties, to its results.

    Attributes:
        runs: the function.
        segments: how many segments it runs.
        distinct: how many of them are different code.
        compiled: what Inductor made of the whole graph, if it was given the whole.
    """

    runs: Runs
    segments: int = 0
    distinct: int = 0
    compiled: Runs | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph."""
        return self.runs(args)


def lower(graph: Graph, backend: str) -> Executable:
    """Make a scheduled graph runnable.

    Args:
        graph: a flat graph.
        backend: one of `BACKENDS`.

    Raises:
        RuntimeError: if Inductor cannot compile a segment. Names its operations and their source lines.
    """
    return BACKENDS[backend](graph)


def _fx(graph: Graph) -> Executable:
    """Run the graph's operations one by one, each value freed after its last use: the reference."""
    graph = copied(graph)
    for node in graph.nodes:
        loop = loop_of(node)
        node.target = running(loop, _fx(loop.body)) if loop else INSTEAD.get(node.target, node.target)
    forward = GraphModule({}, graph).forward

    def run(args: list[Any]) -> Sequence[Any]:
        mine = tuple(args)
        args.clear()
        return forward(*mine)

    return Executable(run)


def _whole(graph: Graph) -> Executable:
    """Compile the graph as one, collectives and all.

    It must be functional: Inductor would drop the copy of a value that a collective overwrites.
    """
    compiled = _compile(graph, [n.meta["val"] for n in graph.nodes if is_input(n)], "the whole step")

    def run(args: list[Any]) -> Sequence[Any]:
        return (_marked if profiling() else _called)(compiled, args)

    return Executable(run, compiled=compiled)


class _Ready(NamedTuple):
    """An instruction whose code is compiled.

    Attributes:
        is_segment: whether `f` is compiled code of several values, or one operation.
        f: the function.
        given: of a segment the slots of its arguments; of an operation the function from all slots to its arguments.
        out: the slots of a segment's results; the slot of an operation's.
        free: slots that are not needed after it.
    """

    is_segment: bool
    f: Callable[..., Any]
    given: Any
    out: Any
    free: list[int]


def _piecewise(graph: Graph) -> Executable:
    """Compile each distinct segment between collectives once, and run segments and collectives in turn."""
    return _in_pieces(graph, {})


def _in_pieces(graph: Graph, compiled: dict[Hashable, Runs]) -> Executable:
    """Do so, but for segments that are `compiled` already."""
    instructions, slots, results = program_of(graph)
    ready: list[_Ready] = []
    inner = 0  # segments of loops
    for i, x in enumerate(instructions):
        if isinstance(x, Segment):
            if x.key not in compiled:
                where = f"instruction {i} of {len(instructions)}"
                compiled[x.key] = _fx(x.graph) if x.scalars else _compile(x.graph, x.fakes, where)
            ready.append(_Ready(True, compiled[x.key], x.ins, x.outs, x.free))
        elif isinstance(x.target, Loop):
            body = _in_pieces(x.target.body, compiled)
            inner += body.segments
            ready.append(_Ready(False, running(x.target, body), x.arguments.of, x.out, x.free))
        else:
            ready.append(_Ready(False, INSTEAD.get(x.target, x.target), x.arguments.of, x.out, x.free))

    def run(args: list[Any]) -> Sequence[Any]:
        call = _marked if profiling() else _called
        env: list[Any] = [*args, *[None] * (slots - len(args))]
        args.clear()
        for is_segment, f, given, out, free in ready:
            if is_segment:
                mine = [env[i] for i in given]
                for i in free:
                    env[i] = None
                for i, value in zip(out, call(f, mine), strict=True):
                    env[i] = value
                value = None
            else:
                env[out] = _applied(f, given(env))
                for i in free:
                    env[i] = None
        return [None if i is None else env[i] for i in results]

    return Executable(run, sum(x.is_segment for x in ready) + inner, len(compiled))


def _applied(f: Callable[..., Any], given: tuple[Sequence[Any], dict[str, Any]]) -> Any:
    return f(*given[0], **given[1])


def _called(f: Runs, args: list[Any]) -> Sequence[Any]:
    return f(args)


def _marked(f: Runs, args: list[Any]) -> Sequence[Any]:
    """Let the profiler see a segment: compiled code calls no operations."""
    with torch.profiler.record_function("fzero::segment"):
        return f(args)


def _compile(graph: Graph, fakes: Sequence[torch.Tensor], where: str) -> Runs:
    try:
        return inductor(GraphModule({}, graph), fakes)
    except Exception as error:
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        lines = list(dict.fromkeys(line for n in nodes if (line := line_of(n))))
        names = list(dict.fromkeys(str(n.target) for n in nodes))
        raise RuntimeError(
            f"fzero.jit: Inductor could not compile {where} ({len(nodes)} operations: {', '.join(names[:6])}"
            f"{', ...' if len(names) > 6 else ''}), traced from {', '.join(lines[:6])}: {error}. "
            'backend="fx" runs without a compiler'
        ) from error


BACKENDS: dict[str, Callable[[Graph], Executable]] = {
    "inductor": _piecewise,
    "fx": _fx,
    "inductor-whole": _whole,
}
