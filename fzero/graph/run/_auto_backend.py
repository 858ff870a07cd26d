"""A step that runs uncompiled until other processes have compiled it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero.graph.run._executable import make_segments_executable
from fzero.graph.run._fallback import Refusal, compile_checked, merge_refusals, notify, serialize
from fzero.graph.run._program import Program
from fzero.graph.run._segment_compiler import Code, GraphFunction, can_load, compile_and_mark, is_compiled
from fzero.graph.run._workers import Workers
from fzero.ranks import Mesh, gather_texts

__all__ = ["make_auto"]


_log = logging.getLogger("fzero.jit")

_MAX_LOAD_SECONDS = 0.5  # the time within one step for loading compiled code


def make_auto(
    uncompiled: GraphFunction, program: Program, codes: Sequence[Code], workers: Workers, mesh: Mesh | None
) -> GraphFunction:
    """Make a function that runs a step uncompiled at first, and compiled as soon as all ranks can.

    Args:
        uncompiled: the step, operation by operation.
        program: the step, in segments.
        codes: the step's distinct segments.
        workers: the processes that compile the missing segments.
        mesh: the mesh whose ranks switch together.
    """
    return _Auto(uncompiled=uncompiled, program=program, pending=list(codes), workers=workers, mesh=mesh)


@dataclass
class _Auto:
    """The function that `make_auto` makes, and its progress.

    Attributes:
        uncompiled: the step, operation by operation.
        program: the step, in segments.
        pending: the segments that are not loaded yet.
        loaded: the functions of loaded segments, by the name of their code.
        refusals: the reasons of segments that cannot run compiled, by the name of their code.
        calls: how often the step was called uncompiled.
        compiled: the compiled step, once it runs.
    """

    uncompiled: GraphFunction
    program: Program
    pending: list[Code]
    workers: Workers
    mesh: Mesh | None
    loaded: dict[str, GraphFunction] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    calls: int = 0
    compiled: GraphFunction | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the step, compiled if possible."""
        if self.compiled is None:
            self.calls += 1
            self._load_segments()
            self._switch_if_all_can()
        return self.uncompiled(args) if self.compiled is None else self.compiled(args)

    def _load_segments(self) -> None:
        """Load and check compiled segments for a while. If the workers have ended, compile the missing ones here."""
        until = time.monotonic() + _MAX_LOAD_SECONDS
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

    def _switch_if_all_can(self) -> None:
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
        self.compiled = make_segments_executable(
            self.program, {k: x for k, x in self.loaded.items() if k not in refusals}
        )
