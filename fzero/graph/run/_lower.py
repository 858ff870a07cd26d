"""Executors: three ways to run a scheduled graph, each in exactly its order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fzero._torch import inductor, line_of, profiling
from fzero.collectives.gloo import INSTEAD
from fzero.graph.ir import copied, is_input
from fzero.graph.run._pieces import Call, Segment, pieces

__all__ = ["BACKENDS", "Executable", "lower"]

Executable = Callable[[list[Any]], Sequence[Any]]


def lower(graph: Graph, backend: str) -> Executable:
    """Make a scheduled graph runnable.

    Args:
        graph: a flat graph.
        backend: one of `BACKENDS`.

    Returns:
        A function of the list of the graph's arguments, which it empties, to its results.

    Raises:
        RuntimeError: if Inductor cannot compile a segment. Names its operations and their source lines.
    """
    return BACKENDS[backend](graph)


def _fx(graph: Graph) -> Executable:
    """Run the graph's operations one by one, each value freed after its last use: the reference."""
    graph = copied(graph)
    for node in graph.nodes:
        node.target = INSTEAD.get(node.target, node.target)
    forward = GraphModule({}, graph).forward

    def run(args: list[Any]) -> Sequence[Any]:
        mine = tuple(args)
        args.clear()
        return forward(*mine)

    return run


def _whole(graph: Graph) -> Executable:
    """Compile the graph as one, collectives and all.

    It must be functional: Inductor would drop the copy of a value that a collective overwrites.
    """
    compiled = _compile(graph, [n.meta["val"] for n in graph.nodes if is_input(n)], "the whole step")

    def run(args: list[Any]) -> Sequence[Any]:
        return (_marked if profiling() else _called)(compiled, args)

    run.compiled = compiled  # pyright: ignore
    return run


def _piecewise(graph: Graph) -> Executable:
    """Compile each distinct segment between collectives once, and run segments and collectives in turn."""
    compiled: dict[Any, Executable] = {}
    program = pieces(graph)
    count = sum(isinstance(step, Segment) for step in program.steps)
    runs: list[tuple[Any, ...]] = []
    for i, step in enumerate(program.steps):
        if isinstance(step, Call):
            runs.append((False, INSTEAD.get(step.target, step.target), step.template, step.out, step.free))
            continue
        if step.key not in compiled:
            compiled[step.key] = _compile(step.graph, step.fakes, f"step {i} of {len(program.steps)}")
        runs.append((True, compiled[step.key], step.ins, step.outs, step.free))
    slots, results = program.slots, program.results

    def run(args: list[Any]) -> Sequence[Any]:
        call = _marked if profiling() else _called
        env: list[Any] = [*args, *[None] * (slots - len(args))]
        args.clear()
        for is_segment, f, ins, out, free in runs:
            if is_segment:
                given = [env[i] for i in ins]
                for i in free:
                    env[i] = None
                for i, value in zip(out, call(f, given), strict=True):
                    env[i] = value
                value = None
            else:
                env[out] = _applied(f, ins(env))
                for i in free:
                    env[i] = None
        return [None if i is None else env[i] for i in results]

    run.segments, run.distinct = count, len(compiled)  # pyright: ignore
    return run


def _applied(f: Callable[..., Any], given: tuple[Sequence[Any], dict[str, Any]]) -> Any:
    return f(*given[0], **given[1])


def _called(f: Executable, args: list[Any]) -> Sequence[Any]:
    return f(args)


def _marked(f: Executable, args: list[Any]) -> Sequence[Any]:
    """Let the profiler see what is compiled, which calls no operations."""
    with torch.profiler.record_function("fzero::segment"):
        return f(args)


def _compile(graph: Graph, fakes: Sequence[torch.Tensor], where: str) -> Executable:
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
