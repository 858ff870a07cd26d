"""watch: compare the measured memory and time of a step with its plan, while it trains."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from fzero import _torch, tree
from fzero._arguments import check_int
from fzero._format import format_bytes
from fzero._tracebacks import api_boundary
from fzero.graph import Jitted, Plan
from fzero.observe import Rows
from fzero.ranks import is_leader
from fzero.tuning._hint import Hint, straggler_hints
from fzero.tuning._machines import Machine, machine_of
from fzero.tuning._table_views import duration

__all__ = ["Measurement", "Meter", "StepMeasurement", "WatchedStep", "find_hints", "meter_of", "watch"]

# Meters measure one call of a step with the counters of its device, without waiting for the device.


class Measurement(NamedTuple):
    """The measurement of one call.

    Attributes:
        seconds: a function that waits for the end of the call, and returns how long it ran on its device.
        idle_seconds: a function that returns how long the device idled between the last call and this one; 0 for the
            first. Call it after the call has ended.
        is_over: a function that returns whether the device has finished the call.
        added_bytes: the most bytes alive at once, in addition to those before the call; None if not measured.
        before_bytes: the bytes alive before the call; None if there is no counter.
        reserved_bytes: the most bytes that the caching allocator reserved; None without such an allocator.
        retries: how often the allocator freed its cache and tried again, since the process began.
    """

    seconds: Callable[[], float]
    idle_seconds: Callable[[], float]
    is_over: Callable[[], bool]
    added_bytes: int | None = None
    before_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0


class Meter:
    """Measures calls of a step on a CPU, by the clock and by the events of torch's allocator."""

    def __init__(self) -> None:
        self._last_end: float | None = None

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Measurement]:
        """Run a call.

        Args:
            call: the step, bound to its arguments.
            memory: whether to measure its peak, which takes some milliseconds.
        """
        start = time.perf_counter()
        idle = 0.0 if self._last_end is None else start - self._last_end
        added = None
        if memory:
            with _torch.allocations() as record:
                out = call()
            added = record.peak
        else:
            out = call()
        self._last_end = end = time.perf_counter()
        return out, Measurement(lambda: end - start, lambda: idle, lambda: True, added)


class _DeviceMeter(Meter):
    """Measures calls on an accelerator, by events on its stream and by the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._last: Any = None  # the event of the last call's end

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Measurement]:
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before = torch.accelerator.memory_allocated(self._device) if memory else None
        if memory:
            torch.accelerator.reset_peak_memory_stats(self._device)
        start.record(torch.accelerator.current_stream(self._device))
        out = call()
        end.record(torch.accelerator.current_stream(self._device))
        last, self._last = self._last, end

        def seconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        measurement = Measurement(
            seconds,
            lambda: 0.0 if last is None else last.elapsed_time(start) / 1e3,
            end.query,
        )
        if before is not None:
            stats = torch.accelerator.memory_stats(self._device)
            measurement = measurement._replace(
                added_bytes=stats["allocated_bytes.all.peak"] - before,
                before_bytes=before,
                reserved_bytes=stats["reserved_bytes.all.peak"],
                retries=stats["num_alloc_retries"],
            )
        return out, measurement


def meter_of(tensors: list[torch.Tensor]) -> Meter:
    """Return a meter for the device that tensors lie on."""
    device = next((x.device for x in tensors if _torch.is_accelerator(x.device)), None)
    return Meter() if device is None else _DeviceMeter(device)


# Readings compare a measurement with its plan. Hints explain the differences.


PEAK_TOLERANCE = 0.05  # hint at a peak that exceeds its plan by more than this share
RESERVED_TOLERANCE = 0.10  # hint at reserved bytes that exceed the peak by more than this share
IDLE_SHARE = 0.10  # hint at idle time between steps above this share
SLOW_FACTOR = 1.3  # hint at a step slower than its plan by this factor
MIN_CALLS = 3  # calls that a median needs at least
MIN_BYTES = 1 << 20  # smaller differences deserve no hint


@dataclass(frozen=True)
class StepMeasurement:
    """The measurement of one call of a step, and its plan.

    Attributes:
        step: the number of the call.
        measurement: the measured numbers.
        plan: the plan of the call; None if there is none, as for ranks in lockstep.
        has_machine: whether the seconds of the plan are for a machine that the user chose.
        has_compilation: whether the call included tracing or compilation, so that its time is not typical.
    """

    step: int
    measurement: Measurement
    plan: Plan | None
    has_machine: bool
    has_compilation: bool

    @property
    def seconds(self) -> float:
        """The seconds of the call. Reading this waits for the device."""
        return self.measurement.seconds()

    @property
    def peak_bytes(self) -> int | None:
        """The peak bytes on the device; None if they were not measured.

        Without a counter, the bytes before the call are assumed to be those of the arguments.
        """
        measurement, plan = self.measurement, self.plan
        before = measurement.before_bytes if measurement.before_bytes is not None else plan and plan.argument_bytes
        return None if measurement.added_bytes is None or before is None else measurement.added_bytes + before

    @property
    def above(self) -> float:
        """The share by which the peak exceeds the plan's; 0 if one of them is not known."""
        peak, plan = self.peak_bytes, self.plan
        if peak is None or plan is None or not plan.peak_bytes:
            return 0.0
        return peak / (plan.peak_bytes + plan.workspace_bytes) - 1

    def scalars(self) -> dict[str, float]:
        """Return the measured and planned numbers by name, for writers of `fzero.observe`. Waits for the device."""
        scalars: dict[str, float] = {"time/seconds": self.seconds, "time/between": self.measurement.idle_seconds()}
        if self.plan is not None and self.has_machine:
            scalars["time/planned"] = self.plan.seconds
        if self.peak_bytes is not None:
            scalars["memory/peak_bytes"] = self.peak_bytes
        if self.plan is not None:
            scalars["memory/planned_bytes"] = self.plan.peak_bytes
        if self.measurement.reserved_bytes is not None:
            scalars["memory/reserved_bytes"] = self.measurement.reserved_bytes
        return scalars

    def __str__(self) -> str:
        """Format the measured numbers as a line, with the planned ones in brackets. Waits for the device."""
        parts = []
        if self.peak_bytes is not None and self.plan is not None:
            parts.append(
                f"peak {format_bytes(self.peak_bytes)} (plan {format_bytes(self.plan.peak_bytes)}, {self.above:+.1%})"
            )
        elif self.measurement.added_bytes is not None:
            parts.append(f"adds {format_bytes(self.measurement.added_bytes)} to its arguments")
        elif self.plan is not None:
            parts.append(f"peak not measured (plan {format_bytes(self.plan.peak_bytes)})")
        planned = f" (plan {duration(self.plan.seconds)})" if self.plan is not None and self.has_machine else ""
        parts.append(
            f"{duration(self.seconds)}{planned}{', with tracing and compilation' if self.has_compilation else ''}"
        )
        return f"step {self.step}: {', '.join(parts)}"


def find_hints(measurements: Sequence[StepMeasurement]) -> list[Hint]:
    """List hints for the last of some consecutive measurements.

    Args:
        measurements: measurements of consecutive calls. The memory of the last call was measured.
    """
    last = measurements[-1]
    return [*_memory_hints(last), *_allocator_hints(last, measurements[0]), *_time_hints(measurements)]


def _memory_hints(last: StepMeasurement) -> list[Hint]:
    """Return hints if the bytes before the step, or those that it adds, exceed the plan."""
    plan, added = last.plan, last.measurement.added_bytes
    if plan is None or added is None:
        return []
    tolerance = max(PEAK_TOLERANCE * plan.peak_bytes, MIN_BYTES)
    prefix = f"peak {last.above:.0%} above plan"
    hints = []
    before = last.measurement.before_bytes
    outside = 0 if before is None else before - plan.argument_bytes
    workspace = min(max(outside, 0), plan.workspace_bytes)  # the rest of it is taken in this step
    outside, more = outside - workspace, added - plan.added_bytes - (plan.workspace_bytes - workspace)
    if outside > tolerance:
        hints.append(
            Hint(
                "outside the step",
                f"{prefix}: {format_bytes(outside)} are held besides the step's arguments, such as a "
                "second copy of the parameters, batches fetched ahead, or a model that was not donated to init",
            )
        )
    if more > tolerance:
        hints.append(
            Hint(
                "workspaces",
                f"{prefix}: the step itself adds {format_bytes(more)} more than planned: workspaces of "
                "kernels, or layouts that a compiler chose; docs/plan.md#how-true-it-is lists them",
            )
        )
    return hints


def _allocator_hints(last: StepMeasurement, first: StepMeasurement) -> list[Hint]:
    """Return hints on fragmentation and retries of the caching allocator."""
    reserved, peak = last.measurement.reserved_bytes, last.peak_bytes
    hints = []
    if reserved is not None and peak is not None and reserved - peak > max(RESERVED_TOLERANCE * peak, MIN_BYTES):
        over = f"{reserved / last.plan.peak_bytes - 1:.0%} above plan" if last.plan is not None else "above its use"
        hints.append(
            Hint(
                "fragmentation",
                f"the allocator holds {format_bytes(reserved)}, {over}, of which "
                f"{format_bytes(reserved - peak)} were never used at once; set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or call torch.accelerator.empty_cache() after init",
            )
        )
    retries = last.measurement.retries - first.measurement.retries
    if retries > 0:
        hints.append(
            Hint(
                "out of room",
                f"the allocator freed its cache {retries} times to find room, and "
                "waited for the device each time; a smaller micro-batch or a higher stage needs less memory",
            )
        )
    return hints


def _time_hints(measurements: Sequence[StepMeasurement]) -> list[Hint]:
    """Return hints on idle time and slow steps, by the medians of all calls without compilation."""
    steady = [r for r in measurements if not r.has_compilation]
    if len(steady) < MIN_CALLS:
        return []
    seconds, idle = (
        median(values) for values in zip(*[(r.seconds, r.measurement.idle_seconds()) for r in steady], strict=True)
    )
    hints = []
    if idle > IDLE_SHARE * (seconds + idle):
        hints.append(
            Hint(
                "between steps",
                f"{duration(idle)} pass between two steps, {idle / (seconds + idle):.0%} of the time: batches, "
                "logs or checkpoints; fzero.data.batches(..., num_workers=4) loads ahead",
            )
        )
    plan = steady[-1].plan
    if plan is not None and steady[-1].has_machine and seconds > SLOW_FACTOR * plan.seconds:
        hints.append(
            Hint(
                "slow",
                f"a step takes {duration(seconds)}, {seconds / plan.seconds:.1f} times the planned time; "
                "print(fzero.profile(step, ...)) shows where the time goes",
            )
        )
    return hints


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
        TypeError: if `step` is not jitted, or a writer is no function.
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
    return WatchedStep(step, writers, every, first, None if machine is None else machine_of(machine), print_fn)


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
            self._write(self._due_count)
        if self._meter is None:
            self._meter = meter_of(tree.tensors((args, kwargs)))
        traces, is_due = self.step.traces, self._calls % self._every == 0
        memory = traces > 0 and (is_due or self._has_compiled)
        # with several plans, choose the one of these arguments
        plan = self.step.plan(*args, **kwargs) if traces > 1 else None
        out, measurement = self._meter(lambda: self.step(*args, **kwargs), memory)
        self._has_compiled = self.step.traces > traces
        self._pending.append(
            StepMeasurement(
                self._first + self._calls, measurement, self._plan(plan), self._has_machine, self._has_compiled
            )
        )
        self._calls += 1
        if memory or is_due:
            self._due_count = len(self._pending)
        return out

    @property
    def _has_machine(self) -> bool:
        return self._machine is not None

    def _plan(self, plan: Plan | None) -> Plan | None:
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
        self._write(len(self._pending))

    def _write(self, count: int) -> None:
        """Write the first `count` pending measurements, and report the last measured one of them."""
        measurements, self._pending, self._due_count = (
            self._pending[:count],
            self._pending[count:],
            max(self._due_count - count, 0),
        )
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
