"""The backends: four ways to run a scheduled graph, each in exactly its order."""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero._torch import profiling
from fzero.graph._collector import paused_collector
from fzero.graph._ir import is_input, results
from fzero.graph._polynomials import Shapes
from fzero.graph.run._clock import COMPILED, now, place_of, timed
from fzero.graph.run._compile import Code, Runs, can_load, compile_all, compile_graph, compiled, is_compiled, progress
from fzero.graph.run._compiled import Executable, codes_of, in_pieces, one_by_one, run_marked
from fzero.graph.run._fallback import Refusal, all_refusals, attempt, packed, proved, tell, united
from fzero.graph.run._lengths import Lengths, for_all_lengths
from fzero.graph.run._program import Program, arriving, program_of
from fzero.graph.run._workers import Workers, helpers, start
from fzero.ranks import Mesh, gather_texts

__all__ = ["BACKENDS", "Demand", "auto", "lower"]

# Auto: a step that runs uncompiled until other processes have compiled it.
#
# Both ways follow one plan. They differ as eager and compiled code do, in how sums are rounded. So all ranks change
# over in the same step: else copies of one parameter would come to differ.


log = logging.getLogger("fzero.jit")

SECONDS = 0.5  # of a step, for loading what is compiled


def auto(slow: Runs, program: Program, codes: Sequence[Code], workers: Workers, mesh: Mesh | None) -> Runs:
    """Make a function that runs a step uncompiled, and compiled from the step on in which all ranks can.

    Args:
        slow: the step, operation by operation.
        program: the step, in segments.
        codes: its distinct segments.
        workers: who compile those that are not compiled.
        mesh: whose ranks change over together.
    """
    return _Auto(slow, program, list(codes), workers, mesh)


@dataclass
class _Auto:
    """The function, and how far it is.

    Attributes:
        left: the segments that are not loaded yet.
        loaded: the functions of the others, by the name of their code.
        refusals: of those that cannot run compiled.
        calls: how often it was called.
        fast: the step, compiled.
    """

    slow: Runs
    program: Program
    left: list[Code]
    workers: Workers
    mesh: Mesh | None
    loaded: dict[str, Runs] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    calls: int = 0
    fast: Runs | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the step, one way or the other."""
        if self.fast is None:
            self.calls += 1
            self._load()
            self._change_over()
        return self.slow(args) if self.fast is None else self.fast(args)

    def _load(self) -> None:
        """Load and prove what is compiled, for a while; if the workers have ended, compile what they left."""
        until = time.monotonic() + SECONDS
        while self.left and time.monotonic() < until:
            code = next((c for c in self.left if is_compiled(c) or self.workers.are_done()), None)
            if code is None or not can_load():
                return
            outcome = proved(code, compiled)
            if isinstance(outcome, Refusal):
                self.refusals[code.name] = outcome
            else:
                self.loaded[code.name] = outcome
            self.left.remove(code)

    def _change_over(self) -> None:
        """Run compiled from now on, if all ranks can: they ask one another at each call, and later now and then."""
        refusals = self.refusals
        if self.mesh is not None and self.mesh.distributed:
            if self.calls > 32 and self.calls % 32:
                return
            texts = gather_texts("" if self.left else packed(refusals, self.mesh.rank), self.mesh, "jit/auto")
            if not all(texts):
                return
            refusals = united(texts)
        elif self.left:
            return
        self.workers.stop()
        tell([*refusals.values()], self.mesh, strict=False)
        log.info("the step runs compiled from call %d on", self.calls)
        self.fast = in_pieces(self.program, {k: x for k, x in self.loaded.items() if k not in refusals})


# Executors: four ways to run a scheduled graph, each in exactly its order.


class Demand(NamedTuple):
    """What is asked of an executable.

    Attributes:
        mesh: whose ranks run it, if they are to agree on when they run compiled code.
        strict: whether what cannot run compiled is an error.
        lengths: what was compiled for other lengths, if code is to serve several.
        shapes: of the arguments that it is for.
        alone: whether other ranks may not come here now: they run other lengths, which this rank did not trace either.
    """

    mesh: Mesh | None = None
    strict: bool = False
    lengths: Lengths | None = None
    shapes: Shapes = ()
    alone: bool = False

    @property
    def agreement_mesh(self) -> Mesh | None:
        """The mesh whose ranks agree on what runs compiled."""
        return None if self.alone else self.mesh


NOTHING_MORE = Demand()


def lower(graph: Graph, backend: str, demand: Demand = NOTHING_MORE) -> Executable:
    """Make a scheduled graph runnable.

    Args:
        graph: a flat graph.
        backend: one of `BACKENDS`.
        demand: what else is asked of it.

    Raises:
        CompileError: if a segment cannot run compiled on some rank, and `strict`. Names its operations and their source
            lines.
    """
    return BACKENDS[backend](graph, demand)


def _fx(graph: Graph, demand: Demand) -> Executable:
    """Run the graph's operations one by one: the reference."""
    return one_by_one(arriving(graph))


def _whole(graph: Graph, demand: Demand) -> Executable:
    """Compile the graph as one, collectives and all.

    It must be functional: Inductor would drop the copy of a value that a collective overwrites.
    """
    fakes = [n.meta["val"] for n in graph.nodes if is_input(n)]
    made = [n.meta["val"] if isinstance(n, Node) else None for n in results(graph)]
    compiled = attempt(lambda: compile_graph(graph, fakes, made, "the whole step"))
    refusals = all_refusals({"whole": compiled} if isinstance(compiled, Refusal) else {}, demand.agreement_mesh)
    tell([*refusals.values()], demand.mesh, demand.strict)
    if refusals or isinstance(compiled, Refusal):
        return one_by_one(graph)

    def run(args: list[Any]) -> Sequence[Any]:
        if (note := now()) is not None:
            return timed(note, COMPILED, *place_of(graph), lambda: compiled(args))
        return run_marked(compiled, args) if profiling() else compiled(args)

    return Executable(run, compiled=compiled)


def _piecewise(graph: Graph, demand: Demand) -> Executable:
    """Compile each distinct segment between collectives once, and run segments and collectives in turn."""
    program = program_of(arriving(graph))
    codes = codes_of(program)
    known = demand.lengths
    shared = {} if known is None else for_all_lengths(codes, known, demand.shapes, demand.agreement_mesh)
    refused = set() if known is None else known.refused  # by some rank, so that no other runs it compiled
    codes = [code for code in codes if code.name not in shared and code.name not in refused]
    cold = [code for code in codes if not is_compiled(code)]
    workers = start(cold, helpers(cold))
    try:
        with nullcontext() if cold else paused_collector():  # what is loaded is kept; what compiles leaves garbage
            outcomes = {code.name: found for code, found in progress(compile_all(codes, proved), len(codes))}
    finally:
        workers.stop()
    refusals = all_refusals({name: x for name, x in outcomes.items() if isinstance(x, Refusal)}, demand.agreement_mesh)
    tell([*refusals.values()], demand.mesh, demand.strict)
    refused.update(refusals)
    alone = {k: x for k, x in outcomes.items() if not isinstance(x, Refusal) and k not in refusals}
    return in_pieces(program, shared | alone)


def _auto(graph: Graph, demand: Demand) -> Executable:
    """Run operations one by one until all segments are compiled, which happens in another process."""
    graph = arriving(graph)
    program = program_of(graph)
    codes = codes_of(program)
    cold = [code for code in codes if not is_compiled(code)]
    workers = start(cold, 1 if cold else 0, nice=10)
    runs = auto(one_by_one(graph), program, codes, workers, demand.mesh)
    weakref.finalize(runs, workers.stop)  # a step may be let go while they compile
    return Executable(runs, sum(1 for _ in program.compiled()), len(codes))


BACKENDS: dict[str, Callable[[Graph, Demand], Executable]] = {
    "inductor": _piecewise,
    "auto": _auto,
    "fx": _fx,
    "inductor-whole": _whole,
}
