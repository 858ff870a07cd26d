"""watch: compare the measured memory and time of a step with its plan, while it trains."""

from collections.abc import Callable, Sequence
from typing import Any

from fzero import _torch, tree
from fzero._arguments import check_callable, check_int
from fzero._tracebacks import api_boundary
from fzero.graph import Jitted, Plan
from fzero.observe import Rows
from fzero.ranks import is_leader
from fzero.tuning.machines import Machine, find_machine
from fzero.tuning.measurements._hint import Hint, straggler_hints
from fzero.tuning.measurements._measurement import StepMeasurement, find_hints
from fzero.tuning.measurements._meter import Meter, make_meter

__all__ = ["WatchedStep", "watch"]


@api_boundary
def watch(
    step: Jitted,
    *writers: Callable[[Rows], None],
    every: int = 20,
    first: int = 0,
    machine: str | Machine | None = None,
    print_fn: Callable[[str], Any] | None = print,
) -> "WatchedStep":
    """Watch a jitted step: compare its measured peak and time with its plan, and explain differences by hints.

    Call the result like the step; it returns the same results. It measures memory at the first call without
    compilation, and at each `every`-th call. That costs some milliseconds on a CPU, and some microseconds on a GPU. No
    call waits for the device. Each measured call is reported by a line, and each hint once. On a mesh of processes,
    a rank that is slower than the others is a hint: which one, where, by how much, and since which step.

    On a GPU the peak comes from torch's caching allocator, whose peak counters are reset. On a CPU it comes from the
    allocator's events in threads that torch starts. Allocations of gloo's own threads are not seen.

    Args:
        step: a step that `fzero.jit` returned.
        *writers: writers of `fzero.observe`, such as `tensorboard("runs/gpt")`. They get the seconds of each call, and
            the bytes of measured calls.
        every: memory is measured once in this number of calls.
        first: the number of the first call, for a run that resumes.
        machine: a name such as "h100", or a `fzero.tuning.Machine`. Its planned seconds are compared with the measured
            ones. By default seconds are not compared.
        print_fn: a function that gets each line; None for silence.

    Returns:
        A `WatchedStep`. On a mesh of processes only rank 0 writes and reports.

    Raises:
        TypeError: if `step` is not jitted, or a writer is not a function.
        ValueError: if `every` or `first` is not a number of calls, or `machine` is unknown.

    Example:
        >>> import fzero, torch
        >>> step = fzero.tuning.watch(fzero.jit(lambda x: torch.tanh(x) @ x, backend="fx"), every=100)
        >>> x = torch.ones(256, 256)
        >>> for _ in range(3):
        ...     y = step(x)
        step 1: peak 786.4 kB (plan 786.4 kB, +0.0%), ...
        >>> step.last.peak_bytes == step.last.plan.peak_bytes
        True
    """
    if not isinstance(step, Jitted):
        raise TypeError(
            f"fzero.tuning.watch: step={step!r}: expected a jitted step, fzero.tuning.watch(fzero.jit(step))"
        )
    check_int("every", every, 1, "a number of calls")
    check_int("first", first, 0, "the number of a call")
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"writer {writer!r}: expected a function of rows, such as fzero.observe.jsonl(path)")
    if print_fn is not None:
        check_callable("print_fn", print_fn, "a function of a line, or None")
    return WatchedStep(
        step=step,
        writers=writers,
        every=every,
        first=first,
        machine=None if machine is None else find_machine(machine),
        print_fn=print_fn,
    )


class WatchedStep:
    """A watched step, made by `fzero.tuning.watch`. It forwards the attributes of the jitted step.

    Attributes:
        step: the jitted step.
        last: the measurement of the last measured call; None before the first.
        hints: the hints of that measurement.
    """

    last: StepMeasurement | None
    hints: list[Hint]

    def __init__(
        self,
        step: Jitted,
        writers: Sequence[Callable[[Rows], None]],
        every: int,
        first: int,
        machine: Machine | None,
        print_fn: Callable[[str], Any] | None,
    ) -> None:
        """Keep the step and where its measurements go; nothing is measured before the first call."""
        self.step, self.last, self.hints = step, None, []
        self._writers, self._every, self._print = writers, every, print_fn
        self._machine, self._first = machine, first
        self._is_leader = is_leader(getattr(step, "mesh", None))
        self._meter: Meter | None = None
        self._calls = 0
        # whether the last call was traced, so that the next one is the first without compilation
        self._has_compiled = False
        self._pending: list[StepMeasurement] = []  # measurements that are not written yet
        self._due_count = 0  # how many of them the next write covers
        self._plans: dict[int, Plan] = {}  # by the id of the step's plan: the same plan with the machine's seconds
        self._reported: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the jitted step: init, gather, plan, mesh, and so on."""
        if name.startswith("_") or name == "step":
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"WatchedStep({self.step!r}, every={self._every})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and measure it.

        Args:
            *args: the positional arguments of the step.
            **kwargs: the keyword arguments of the step.

        Returns:
            The results of the step. If the step raises, so does this, and the call is not measured.
        """
        if _torch.in_transform():  # within a trace, the step is traced like any function
            return self.step(*args, **kwargs)
        if self._due_count and self._pending[self._due_count - 1].measurement.is_over():
            self._write_measurements(self._due_count)
        if self._meter is None:
            self._meter = make_meter(tree.tensors((args, kwargs)))
        traces, is_due = self.step.traces, self._calls % self._every == 0
        memory = traces > 0 and (is_due or self._has_compiled)
        # with several plans, choose the one of these arguments
        plan = self.step.plan(*args, **kwargs) if traces > 1 else None
        out, measurement = self._meter(lambda: self.step(*args, **kwargs), memory)
        self._has_compiled = self.step.traces > traces
        self._pending.append(
            StepMeasurement(
                step=self._first + self._calls,
                measurement=measurement,
                plan=self._plan_on_machine(plan),
                has_machine=self._has_machine,
                has_compilation=self._has_compiled,
            )
        )
        self._calls += 1
        if memory or is_due:
            self._due_count = len(self._pending)
        return out

    @property
    def _has_machine(self) -> bool:
        return self._machine is not None

    def _plan_on_machine(self, plan: Plan | None) -> Plan | None:
        """Return a plan with the machine's seconds; by default the last plan of the step."""
        if len(self._plans) != self.step.traces:
            hardware = None if self._machine is None else self._machine.as_hardware()
            plans = zip(self.step.plans(), self.step.plans(hardware), strict=True)
            self._plans = {id(plan): on_machine for plan, on_machine in plans}
        if plan is not None:
            return self._plans[id(plan)]
        return next(reversed(self._plans.values()), None)

    def flush(self) -> None:
        """Write the pending measurements, and report the last measured one. Waits for the device."""
        self._write_measurements(len(self._pending))

    def _write_measurements(self, count: int) -> None:
        """Write the first `count` pending measurements, and report the last measured one of them."""
        measurements, self._pending = self._pending[:count], self._pending[count:]
        self._due_count = max(self._due_count - count, 0)
        measured = [
            i for i, r in enumerate(measurements) if r.measurement.added_bytes is not None and not r.has_compilation
        ]
        if measured:
            self.last = measurements[measured[-1]]
            self.hints = find_hints(measurements[: measured[-1] + 1])
            self.hints += straggler_hints()
        if not measurements or not self._is_leader:
            return
        rows = [(r.step, r.scalars()) for r in measurements]
        for writer in self._writers:
            writer(rows)
        if measured and self._print is not None:
            self._print(str(self.last))
            for hint in [h for h in self.hints if h.key not in self._reported]:
                self._reported.add(hint.key)
                self._print(f"  {hint}")

    def __enter__(self) -> "WatchedStep":
        return self

    def __exit__(self, *error: object) -> None:
        """Write the pending measurements, and close the writers."""
        try:
            self.flush()
        finally:
            for writer in self._writers:
                getattr(writer, "close", lambda: None)()
