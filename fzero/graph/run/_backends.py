"""The backends: four ways to run a scheduled graph, each in exactly its order."""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero._torch import is_profiling
from fzero.graph._collector import pause_collector
from fzero.graph._polynomials import Shapes
from fzero.graph.ir import graph_results, is_input
from fzero.graph.run._clock import COMPILED, current_recorder, record_time, source_of_segment
from fzero.graph.run._executable import Executable, distinct_segments, run_marked, run_operations, run_segments
from fzero.graph.run._fallback import Refusal, all_refusals, attempt, compile_checked, merge_refusals, notify, serialize
from fzero.graph.run._lengths import Lengths, for_all_lengths
from fzero.graph.run._program import Program, make_copies_async, make_program
from fzero.graph.run._segment_compiler import (
    Code,
    Runs,
    can_load,
    compile_all,
    compile_and_mark,
    compile_graph,
    is_compiled,
    progress,
)
from fzero.graph.run._workers import Workers, helpers, start
from fzero.ranks import Mesh, gather_texts

__all__ = ["BACKENDS", "LoweringOptions", "lower"]

# Auto: a step that runs uncompiled until other processes have compiled it.
#
# Uncompiled and compiled steps follow one plan, but round sums differently, as eager and compiled code do. So all ranks
# switch in the same step: otherwise copies of one parameter would come to differ.


_log = logging.getLogger("fzero.jit")

_SECONDS = 0.5  # the time within one step for loading compiled code


def _make_auto(slow: Runs, program: Program, codes: Sequence[Code], workers: Workers, mesh: Mesh | None) -> Runs:
    """Make a function that runs a step uncompiled at first, and compiled as soon as all ranks can.

    Args:
        slow: the step, operation by operation.
        program: the step, in segments.
        codes: the step's distinct segments.
        workers: the processes that compile the missing segments.
        mesh: the mesh whose ranks switch together.
    """
    return _Auto(slow=slow, program=program, pending=list(codes), workers=workers, mesh=mesh)


@dataclass
class _Auto:
    """The function that `_make_auto` makes, and its progress.

    Attributes:
        pending: the segments that are not loaded yet.
        loaded: the functions of loaded segments, by the name of their code.
        refusals: the reasons of segments that cannot run compiled, by the name of their code.
        calls: how often the step was called uncompiled.
        fast: the compiled step, once it runs.
    """

    slow: Runs
    program: Program
    pending: list[Code]
    workers: Workers
    mesh: Mesh | None
    loaded: dict[str, Runs] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    calls: int = 0
    fast: Runs | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the step, compiled if possible."""
        if self.fast is None:
            self.calls += 1
            self._load()
            self._switch()
        return self.slow(args) if self.fast is None else self.fast(args)

    def _load(self) -> None:
        """Load and check compiled segments for a while. If the workers have ended, compile the missing ones here."""
        until = time.monotonic() + _SECONDS
        while self.pending and time.monotonic() < until:
            code = next((c for c in self.pending if is_compiled(c) or self.workers.are_done()), None)
            if code is None or not can_load(code):
                return
            outcome = compile_checked(code, compile_and_mark)
            if isinstance(outcome, Refusal):
                self.refusals[code.name] = outcome
            else:
                self.loaded[code.name] = outcome
            self.pending.remove(code)

    def _switch(self) -> None:
        """Switch to compiled code if all ranks can. They compare at each of the first 32 calls, then at every 32nd."""
        refusals = self.refusals
        if self.mesh is not None and self.mesh.distributed:
            if self.calls > 32 and self.calls % 32:
                return
            texts = gather_texts("" if self.pending else serialize(refusals, self.mesh.rank), self.mesh, "jit/auto")
            if not all(texts):
                return
            refusals = merge_refusals(texts)
        elif self.pending:
            return
        self.workers.stop()
        notify([*refusals.values()], self.mesh, strict=False)
        _log.info("the step runs compiled from call %d on", self.calls)
        self.fast = run_segments(self.program, {k: x for k, x in self.loaded.items() if k not in refusals})


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


def lower(graph: Graph, backend: str, demand: LoweringOptions = _DEFAULT_OPTIONS) -> Executable:
    """Make a scheduled graph runnable.

    Args:
        graph: a flat graph.
        backend: one of `BACKENDS`.
        demand: further requirements.

    Raises:
        CompileError: if `strict`, and a segment cannot run compiled on some rank. The message names the segment's
            operations and their source lines.
    """
    return BACKENDS[backend](graph, demand)


def _fx(graph: Graph, demand: LoweringOptions) -> Executable:
    """Run the graph's operations one by one: the reference."""
    return run_operations(make_copies_async(graph))


def _full_graph(graph: Graph, demand: LoweringOptions) -> Executable:
    """Compile the full graph at once, including its collectives.

    The graph must be functional: Inductor would drop the copy of a value that a collective overwrites.
    """
    stand_ins = [n.meta["val"] for n in graph.nodes if is_input(n)]
    outputs = [n.meta["val"] if isinstance(n, Node) else None for n in graph_results(graph)]
    compiled = attempt(lambda: compile_graph(graph, stand_ins, outputs, "the whole step"))
    refusals = all_refusals({"whole": compiled} if isinstance(compiled, Refusal) else {}, demand.agreement_mesh)
    notify([*refusals.values()], demand.mesh, demand.strict)
    if refusals or isinstance(compiled, Refusal):
        return run_operations(graph)

    def run(args: list[Any]) -> Sequence[Any]:
        if (note := current_recorder()) is not None:
            return record_time(note, COMPILED, *source_of_segment(graph), lambda: compiled(args))
        return run_marked(compiled, args) if is_profiling() else compiled(args)

    return Executable(run, compiled=compiled)


def _piecewise(graph: Graph, demand: LoweringOptions) -> Executable:
    """Compile each distinct segment between collectives once; run segments and collectives alternately."""
    program = make_program(make_copies_async(graph))
    codes = distinct_segments(program)
    lengths = demand.lengths
    shared = {} if lengths is None else for_all_lengths(codes, lengths, demand.shapes, demand.agreement_mesh)
    refused = set() if lengths is None else lengths.refused_names  # refused by some rank, so no rank runs it compiled
    codes = [code for code in codes if code.name not in shared and code.name not in refused]
    cold = [code for code in codes if not is_compiled(code)]
    workers = start(cold, helpers(cold))
    try:
        with nullcontext() if cold else pause_collector():  # compiling leaves garbage to collect, loading does not
            outcomes = {
                code.name: outcome for code, outcome in progress(compile_all(codes, compile_checked), len(codes))
            }
    finally:
        workers.stop()
    refusals = all_refusals({name: x for name, x in outcomes.items() if isinstance(x, Refusal)}, demand.agreement_mesh)
    notify([*refusals.values()], demand.mesh, demand.strict)
    refused.update(refusals)
    single_length = {k: x for k, x in outcomes.items() if not isinstance(x, Refusal) and k not in refusals}
    return run_segments(program, shared | single_length)


def _auto(graph: Graph, demand: LoweringOptions) -> Executable:
    """Run operations one by one until another process has compiled all segments."""
    graph = make_copies_async(graph)
    program = make_program(graph)
    codes = distinct_segments(program)
    cold = [code for code in codes if not is_compiled(code)]
    workers = start(cold, 1 if cold else 0, nice=10)
    runs = _make_auto(run_operations(graph), program, codes, workers, demand.mesh)
    weakref.finalize(runs, workers.stop)  # a step may be freed while the workers compile
    return Executable(runs, sum(1 for _ in program.segments()), len(codes))


BACKENDS: dict[str, Callable[[Graph, LoweringOptions], Executable]] = {
    "inductor": _piecewise,
    "auto": _auto,
    "fx": _fx,
    "inductor-whole": _full_graph,
}
