"""watch: a step that says what it took, beside what was planned, while it trains."""

from collections.abc import Callable, Sequence
from typing import Any

from fzero import _torch, tree
from fzero._tracebacks import api_boundary
from fzero.graph._jit import Jitted
from fzero.graph.plan._plan import Plan
from fzero.metrics import Rows
from fzero.tuning._machines import Machine
from fzero.tuning._meters import Meter, meter_of
from fzero.tuning._named import machine_of
from fzero.tuning._readings import Hint, Reading, hints_of

__all__ = ["Watched", "watch"]


@api_boundary
def watch(
    step: Jitted,
    *writers: Callable[[Rows], None],
    every: int = 20,
    first: int = 0,
    device: str | Machine | None = None,
    say: Callable[[str], Any] | None = print,
) -> "Watched":
    """Watch a jitted step: its measured peak and time beside the plan's, and a hint where they part.

    The result is called like the step, and returns what it returns. The first call that compiles nothing is
    measured, and each `every`-th one: that costs some milliseconds on a CPU, and some microseconds on a GPU. No call
    waits for the device. A line is said for each measured call, and each hint once.

    On a GPU the peak is that of torch's caching allocator, whose peak counters are reset for it. On a CPU it is told by
    the allocator's events, of the threads that torch starts: what gloo allocates in its own is not seen.

    Args:
        step: a step that `fzero.jit` made.
        *writers: of `fzero.metrics`, such as `tensorboard("runs/gpt")`: they get each call's seconds, and the bytes of
            those that are measured.
        every: how many calls there are between two that are measured.
        first: the number of the first call, as of a run that goes on.
        device: "h100" or the like, or a `fzero.tuning.Machine`, whose seconds are compared. By default none is.
        say: what a line is given to; None for silence.

    Returns:
        A `Watched` step. On a mesh of processes rank 0 writes and says.

    Raises:
        TypeError: if `step` is not jitted, or a writer is no function.
        ValueError: if `every` is no number of calls, or `device` is unknown.

    Example:
        >>> import fzero, torch
        >>> step = fzero.watch(fzero.jit(lambda x: torch.tanh(x) @ x, backend="fx"), every=100)
        >>> x = torch.ones(256, 256)
        >>> for _ in range(3):
        ...     y = step(x)
        step 1: peak 786.4 kB (plan 786.4 kB, +0.0%), ...
        >>> step.last.peak_bytes == step.last.plan.peak_bytes
        True
    """
    if not isinstance(step, Jitted):
        raise TypeError(f"fzero.watch: step={step!r}: expected a jitted step, fzero.watch(fzero.jit(step))")
    if type(every) is not int or every < 1:
        raise ValueError(f"every={every!r}: expected a number of calls, 1 or more")
    if type(first) is not int or first < 0:
        raise ValueError(f"first={first!r}: expected the number of a call, 0 or more")
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"a writer is a function of rows, such as fzero.metrics.jsonl(path), not {writer!r}")
    return Watched(step, writers, every, first, None if device is None else machine_of(device), say)


class Watched:
    """A step that is watched. Make it with `fzero.watch`; what else the step offers, it offers too.

    Attributes:
        step: the jitted step.
        last: what the last measured call took; None before the first.
        hints: what parted from the plan in it.
    """

    last: Reading | None
    hints: list[Hint]

    def __init__(
        self,
        step: Jitted,
        writers: Sequence[Callable[[Rows], None]],
        every: int,
        first: int,
        machine: Machine | None,
        say: Callable[[str], Any] | None,
    ) -> None:
        self.step, self.last, self.hints = step, None, []
        self._writers, self._every, self._say = writers, every, say
        self._machine, self._first = machine, first
        mesh = getattr(step, "mesh", None)
        self._leads = mesh is None or mesh.rank == 0
        self._meter: Meter | None = None
        self._calls = 0
        self._compiled = False  # whether the last call was traced, so that the next is the first that is not
        self._kept: list[Reading] = []  # those that are not written yet
        self._due = 0  # how many of them are to be
        self._plans: dict[int, Plan] = {}  # by the plan that the step has, one with the machine's seconds
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Forward to the jitted step: init, gather, plan, mesh, and what else it offers."""
        if name.startswith("_") or name == "step":
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"Watched({self.step!r}, every={self._every})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and measure it.

        Args:
            *args: the step's arguments.
            **kwargs: likewise.

        Returns:
            The step's results. What it raises is raised, and no such call is measured.
        """
        if _torch.in_transform():  # of a trace it is a part like any other
            return self.step(*args, **kwargs)
        if self._due and self._kept[self._due - 1].taken.is_over():
            self._write(self._due)
        if self._meter is None:
            self._meter = meter_of(tree.tensors((args, kwargs)))
        traces, every = self.step.traces, self._calls % self._every == 0
        memory = traces > 0 and (every or self._compiled)
        plan = self.step.plan(*args, **kwargs) if traces > 1 else None  # there are several to choose from
        out, taken = self._meter(lambda: self.step(*args, **kwargs), memory)
        self._compiled = self.step.traces > traces
        self._kept.append(Reading(self._first + self._calls, taken, self._plan(plan), self._timed, self._compiled))
        self._calls += 1
        if memory or every:
            self._due = len(self._kept)
        return out

    @property
    def _timed(self) -> bool:
        return self._machine is not None

    def _plan(self, known: Plan | None) -> Plan | None:
        """Return the plan of a call, with the machine's seconds: the one that is known, or the last that was made."""
        if len(self._plans) != self.step.traces:
            device = None if self._machine is None else self._machine.as_device()
            plans = zip(self.step.plans(), self.step.plans(device), strict=True)
            self._plans = {id(plan): timed for plan, timed in plans}
        if known is not None:
            return self._plans[id(known)]
        return next(reversed(self._plans.values()), None)

    def flush(self) -> None:
        """Write the calls that are kept, and say what was measured. Waits for the device."""
        self._write(len(self._kept))

    def _write(self, count: int) -> None:
        """Write the first of the readings that are kept, and say what the last measured one is."""
        readings, self._kept, self._due = self._kept[:count], self._kept[count:], max(self._due - count, 0)
        measured = [i for i, r in enumerate(readings) if r.taken.added_bytes is not None and not r.first]
        if measured:
            self.last = readings[measured[-1]]
            self.hints = hints_of(readings[: measured[-1] + 1])
        if not readings or not self._leads:
            return
        rows = [(r.step, r.scalars()) for r in readings]
        for writer in self._writers:
            writer(rows)
        if measured and self._say is not None:
            self._say(str(self.last))
            for hint in [h for h in self.hints if h.name not in self._told]:
                self._told.add(hint.name)
                self._say(f"  {hint}")

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is left, and close the writers."""
        try:
            self.flush()
        finally:
            for writer in self._writers:
                getattr(writer, "close", lambda: None)()
