"""Auto: a step that runs uncompiled until other processes have compiled it.

Both ways follow one plan. They differ as eager and compiled code do, in how sums are rounded. So all ranks change over
in the same step: else copies of one parameter would come to differ.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero._notice import notice
from fzero.graph.run._compile import Code, Runs, can_load, compiled, is_compiled
from fzero.graph.run._pieces import in_pieces
from fzero.graph.run._program import Program
from fzero.graph.run._workers import Workers
from fzero.ranks.mesh import Mesh
from fzero.ranks.texts import gather_texts

__all__ = ["auto"]

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
        calls: how often it was called.
        failed: whether a segment cannot be compiled.
        fast: the step, compiled.
    """

    slow: Runs
    program: Program
    left: list[Code]
    workers: Workers
    mesh: Mesh | None
    loaded: dict[str, Runs] = field(default_factory=dict)
    calls: int = 0
    failed: bool = False
    fast: Runs | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the step, one way or the other."""
        if self.fast is None:
            self.calls += 1
            self._load()
            if self._agreed():
                self.workers.stop()
                log.info("the step runs compiled from call %d on", self.calls)
                self.fast = in_pieces(self.program, self.loaded)
        return self.slow(args) if self.fast is None else self.fast(args)

    def _load(self) -> None:
        """Load what is compiled, for a while; if the workers have ended, compile what they left."""
        until = time.monotonic() + SECONDS
        while self.left and not self.failed and time.monotonic() < until:
            code = next((c for c in self.left if is_compiled(c) or self.workers.are_done()), None)
            if code is None or not can_load():
                return
            try:
                self.loaded[code.name] = compiled(code)
            except RuntimeError as error:
                self.failed = True
                notice(f'{error}. So backend="auto" goes on without')
                self.workers.stop()
            self.left.remove(code)

    def _agreed(self) -> bool:
        """Return whether all ranks have loaded all: they ask one another at each call, and later now and then."""
        ready = not self.left and not self.failed
        if self.mesh is None or not self.mesh.distributed:
            return ready
        if self.calls > 32 and self.calls % 32:
            return False
        return all(text == "ready" for text in gather_texts("ready" if ready else "", self.mesh, "jit/auto"))
