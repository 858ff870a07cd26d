"""What a part of the report is made of: cases, and the rows that they give."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import fzero
from benchmarks.gpu.meter import Meter

__all__ = ["RANKS", "Case", "LeftOutError", "Result", "Setting"]

RANKS = 8  # of the world whose rank 0 a single card stands for
Values = dict[str, Any]  # a row's values by the titles of their columns; floats are shown with few digits


class LeftOutError(Exception):
    """A case that cannot run here. The message says why."""


class Setting(NamedTuple):
    """Where and how large the cases are.

    Attributes:
        mesh: an axis "dp" of all ranks.
        exists: whether all ranks are processes; else this one is rank 0 of 8, and the others do not exist.
        toy: whether models are tiny.
        rehearse: whether kernels do nothing, so that numbers are not judged.
        backends: those of `fzero.jit` to measure, and "eager".
        only_compiles: whether cases run for what they leave in the compiler's caches, and no time is taken.
    """

    mesh: fzero.ranks.Mesh
    exists: bool
    toy: bool
    rehearse: bool
    backends: tuple[Any, ...]
    only_compiles: bool = False

    def meter(self) -> Meter:
        """Make a meter of the mesh's device."""
        return Meter(self.mesh.device, 1 if self.only_compiles else 2 if self.toy else 10)

    @property
    def backend(self) -> Any:
        """The backend that users would take: Inductor, unless it is left out."""
        return self.backends[-1]

    @property
    def ranks(self) -> str:
        """The ranks, in words."""
        n = self.mesh.size
        return (f"{n} ranks" if n > 1 else "1 rank") if self.exists else f"rank 0 of {n}; the others do not exist"


class Case(NamedTuple):
    """Something to run.

    Attributes:
        name: the first column of its rows.
        run: runs it and returns its rows. A row whose "holds" is False is a check that failed.
        is_check: whether an error in it is a failed check.
        compiles: whether it waits for Inductor, so that it is run before as well (`benchmarks.gpu.run.compile_all`).
    """

    name: str
    run: Callable[[], list[Values]]
    is_check: bool = False
    compiles: bool = False


@dataclass
class Result:
    """What became of a case.

    Attributes:
        part: the part that it belongs to.
        case: its name.
        outcome: "ok", "wrong" (a check does not hold), "failed" (an error), or "left out".
        reason: the error, or why it was left out.
        rows: its rows.
        seconds: how long it took.
        is_check: as in `Case`.
    """

    part: str
    case: str
    outcome: str
    reason: str = ""
    rows: list[Values] = field(default_factory=list)
    seconds: float = 0.0
    is_check: bool = False

    @property
    def is_failed_check(self) -> bool:
        """Whether the run as a whole failed by it."""
        return self.outcome == "wrong" or (self.is_check and self.outcome == "failed")

    def to_json(self) -> dict[str, Any]:
        """Return it as a dict."""
        return asdict(self)
