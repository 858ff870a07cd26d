"""Auto: a step that runs uncompiled until other processes have compiled it.

Both ways follow one plan. They differ as eager and compiled code do, in how sums are rounded. So all ranks change over
in the same step: else copies of one parameter would come to differ.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero.graph.run._compile import Code, Runs, can_load, compiled, is_compiled
from fzero.graph.run._fallback import Refusal, packed, proved, tell, united
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
