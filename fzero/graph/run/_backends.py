"""The backends: four ways to run a scheduled graph, each in exactly its order."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero._torch import is_profiling
from fzero.graph._collector import pause_collector
from fzero.graph._polynomials import Shapes
from fzero.graph.ir import graph_results, is_input
from fzero.graph.run._auto_backend import make_auto
from fzero.graph.run._clock import COMPILED, current_recorder, record_time, segment_source
from fzero.graph.run._executable import (
    Executable,
    distinct_segments,
    make_operations_executable,
    make_segments_executable,
    run_marked,
)
from fzero.graph.run._fallback import Refusal, all_refusals, attempt, compile_checked, notify
from fzero.graph.run._lengths import Lengths, for_all_lengths
from fzero.graph.run._program import make_copies_async, make_program
from fzero.graph.run._segment_compiler import compile_all, compile_graph, is_compiled, progress
from fzero.graph.run._workers import start_workers, worker_count
from fzero.ranks import Mesh

__all__ = ["BACKENDS", "LoweringOptions", "lower"]


class LoweringOptions(NamedTuple):
    """The requirements of an executable.

    Attributes:
        mesh: the mesh whose ranks agree on the code that runs compiled; None for a single process.
        strict: whether a segment that cannot run compiled is an error.
        lengths: the code for other lengths; None if code serves one length only.
        shapes: the shapes of the arguments.
        alone: whether this rank must not wait for the others here: they may run other, untraced lengths.
    """

    mesh: Mesh | None = None
    strict: bool = False
    lengths: Lengths | None = None
    shapes: Shapes = ()
    alone: bool = False

    @property
    def agreement_mesh(self) -> Mesh | None:
        """The mesh whose ranks agree on the segments that run compiled."""
        return None if self.alone else self.mesh


_DEFAULT_OPTIONS = LoweringOptions()


def lower(graph: Graph, backend: str, options: LoweringOptions = _DEFAULT_OPTIONS) -> Executable:
    """Make a scheduled graph runnable.

    Args:
        graph: a flat graph.
        backend: one of `BACKENDS`.
        options: further requirements.

    Raises:
        CompileError: if `strict`, and a segment cannot run compiled on some rank. The message names the segment's
            operations and their source lines.
    """
    return BACKENDS[backend](graph, options)


def _fx(graph: Graph, options: LoweringOptions) -> Executable:
    """Run the graph's operations one by one: the reference."""
    return make_operations_executable(make_copies_async(graph))


def _full_graph(graph: Graph, options: LoweringOptions) -> Executable:
    """Compile the full graph at once, including its collectives.

    The graph must be functional: Inductor would drop the copy of a value that a collective overwrites.
    """
    stand_ins = [n.meta["val"] for n in graph.nodes if is_input(n)]
    outputs = [n.meta["val"] if isinstance(n, Node) else None for n in graph_results(graph)]
    compiled_graph = attempt(lambda: compile_graph(graph, stand_ins, outputs, "the whole step"))
    refusals = all_refusals(
        {"whole": compiled_graph} if isinstance(compiled_graph, Refusal) else {}, options.agreement_mesh
    )
    notify([*refusals.values()], options.mesh, options.strict)
    if refusals or isinstance(compiled_graph, Refusal):
        return make_operations_executable(graph)

    def run(args: list[Any]) -> Sequence[Any]:
        if (note := current_recorder()) is not None:
            return record_time(note, COMPILED, *segment_source(graph), lambda: compiled_graph(args))
        return run_marked(compiled_graph, args) if is_profiling() else compiled_graph(args)

    return Executable(run, compiled=compiled_graph)


def _piecewise(graph: Graph, options: LoweringOptions) -> Executable:
    """Compile each distinct segment between collectives once; run segments and collectives alternately."""
    program = make_program(make_copies_async(graph))
    codes = distinct_segments(program)
    lengths = options.lengths
    shared_functions = (
        {} if lengths is None else for_all_lengths(codes, lengths, options.shapes, options.agreement_mesh)
    )
    # what some rank refused, no rank runs compiled
    refused_names = set() if lengths is None else lengths.refused_names
    codes = [code for code in codes if code.name not in shared_functions and code.name not in refused_names]
    cold = [code for code in codes if not is_compiled(code)]
    workers = start_workers(cold, worker_count(cold))
    try:
        with nullcontext() if cold else pause_collector():  # compiling leaves garbage to collect, loading does not
            outcomes = {
                code.name: outcome for code, outcome in progress(compile_all(codes, compile_checked), len(codes))
            }
    finally:
        workers.stop()
    refusals = all_refusals({name: x for name, x in outcomes.items() if isinstance(x, Refusal)}, options.agreement_mesh)
    notify([*refusals.values()], options.mesh, options.strict)
    refused_names.update(refusals)
    single_length = {k: x for k, x in outcomes.items() if not isinstance(x, Refusal) and k not in refusals}
    return make_segments_executable(program, shared_functions | single_length)


def _auto(graph: Graph, options: LoweringOptions) -> Executable:
    """Run operations one by one until another process has compiled all segments."""
    graph = make_copies_async(graph)
    program = make_program(graph)
    codes = distinct_segments(program)
    cold = [code for code in codes if not is_compiled(code)]
    workers = start_workers(cold, 1 if cold else 0, nice=10)
    function = make_auto(make_operations_executable(graph), program, codes, workers, options.mesh)
    weakref.finalize(function, workers.stop)  # a step may be freed while the workers compile
    return Executable(function, sum(1 for _ in program.segments()), len(codes))


BACKENDS: dict[str, Callable[[Graph, LoweringOptions], Executable]] = {
    "inductor": _piecewise,
    "auto": _auto,
    "fx": _fx,
    "inductor-whole": _full_graph,
}
