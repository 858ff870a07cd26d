"""watch: a step that says what it took, beside what was planned, while it trains."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from fzero import _torch, tree
from fzero._tracebacks import api_boundary
from fzero.graph import Jitted, Plan, size
from fzero.observe import Rows
from fzero.tuning._machines import Machine, machine_of
from fzero.tuning._table_views import duration

__all__ = ["Hint", "Meter", "Reading", "Taken", "Watched", "hints_of", "meter_of", "watch"]

# Meters: what one call of a step takes, by a device's own counters, without waiting for the device.


class Taken(NamedTuple):
    """What one call took.

    Attributes:
        seconds: returns how long it ran, on its device; waits for its end.
        waited: returns how long the device had nothing of the step to do before it; 0 for the first. To be asked
            when the call has ended.
        is_over: returns whether the device has come to its end.
        added_bytes: the most that it held at once beside what was there before; None if that was not measured.
        before_bytes: what was there before; None where no counter says so.
        reserved_bytes: the most that the device's allocator held, used or not; None where there is no such.
        retries: how often the allocator had to give its cache back, since the process began.
    """

    seconds: Callable[[], float]
    waited: Callable[[], float]
    is_over: Callable[[], bool]
    added_bytes: int | None = None
    before_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = 0


class Meter:
    """Measures calls of a step on a CPU: by its clock, and by the events of torch's allocator."""

    def __init__(self) -> None:
        self._ended: float | None = None

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Taken]:
        """Run a call.

        Args:
            call: the step with its arguments.
            memory: whether its peak is measured, which takes some milliseconds.
        """
        began = time.perf_counter()
        waited = 0.0 if self._ended is None else began - self._ended
        added = None
        if memory:
            with _torch.allocations() as found:
                out = call()
            added = found.peak
        else:
            out = call()
        self._ended = ended = time.perf_counter()
        return out, Taken(lambda: ended - began, lambda: waited, lambda: True, added)


class _CudaMeter(Meter):
    """Measures calls on a GPU: by events on its stream, and by the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._last: Any = None  # the event of the last call's end

    def __call__(self, call: Callable[[], Any], memory: bool) -> tuple[Any, Taken]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = torch.cuda.memory_allocated(self._device) if memory else None
        if memory:
            torch.cuda.reset_peak_memory_stats(self._device)
        began.record(torch.cuda.current_stream(self._device))
        out = call()
        ended.record(torch.cuda.current_stream(self._device))
        last, self._last = self._last, ended

        def seconds() -> float:
            ended.synchronize()
            return began.elapsed_time(ended) / 1e3

        taken = Taken(
            seconds,
            lambda: 0.0 if last is None else last.elapsed_time(began) / 1e3,
            ended.query,
        )
        if before is not None:
            stats = torch.cuda.memory_stats(self._device)
            taken = taken._replace(
                added_bytes=stats["allocated_bytes.all.peak"] - before,
                before_bytes=before,
                reserved_bytes=stats["reserved_bytes.all.peak"],
                retries=stats["num_alloc_retries"],
            )
        return out, taken


def meter_of(tensors: list[torch.Tensor]) -> Meter:
    """Return a meter for the device that tensors lie on."""
    device = next((x.device for x in tensors if x.is_cuda), None)
    return Meter() if device is None else _CudaMeter(device)


# Readings: what a step took, beside what its plan says; and what it means where the two part.


APART = 0.05  # from what share on a peak is said to be apart from its plan
LOOSE = 0.10  # likewise, of what the allocator holds and has not handed out
IDLE = 0.10  # from what share of the time on that passes between steps
SLOW = 1.3  # from how many times a plan's seconds on
FEW = 3  # calls whose median is a usual time
SMALL = 1 << 20  # bytes that are worth no hint


@dataclass(frozen=True)
class Reading:
    """What one call of a step took, beside its plan.

    Attributes:
        step: the number of the call.
        taken: what a meter says.
        plan: of the call; None where nothing was planned, as of ranks in lockstep.
        timed: whether the plan's seconds are of a machine that was named or calibrated.
        first: whether the call was traced or compiled, so that its time is no one's.
    """

    step: int
    taken: Taken
    plan: Plan | None
    timed: bool
    first: bool

    @property
    def seconds(self) -> float:
        """How long the call ran. Waits for the device."""
        return self.taken.seconds()

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of the device that were held at once; None where they were not measured.

        Where no counter says what was there before the call, it is taken to be the arguments.
        """
        taken, plan = self.taken, self.plan
        before = taken.before_bytes if taken.before_bytes is not None else plan and plan.argument_bytes
        return None if taken.added_bytes is None or before is None else taken.added_bytes + before

    @property
    def above(self) -> float:
        """By what share the peak is above the plan's; 0 where one of them is not known."""
        peak, plan = self.peak_bytes, self.plan
        return 0.0 if peak is None or plan is None or not plan.peak_bytes else peak / plan.peak_bytes - 1

    def scalars(self) -> dict[str, float]:
        """Return what was measured and planned by name, as writers of `fzero.observe` take it. Waits for the device."""
        found: dict[str, float] = {"time/seconds": self.seconds, "time/between": self.taken.waited()}
        if self.plan is not None and self.timed:
            found["time/planned"] = self.plan.seconds
        if self.peak_bytes is not None:
            found["memory/peak_bytes"] = self.peak_bytes
        if self.plan is not None:
            found["memory/planned_bytes"] = self.plan.peak_bytes
        if self.taken.reserved_bytes is not None:
            found["memory/reserved_bytes"] = self.taken.reserved_bytes
        return found

    def __str__(self) -> str:
        """Say in a line what was measured, and in brackets what was planned. Waits for the device."""
        said = []
        if self.peak_bytes is not None and self.plan is not None:
            said.append(f"peak {size(self.peak_bytes)} (plan {size(self.plan.peak_bytes)}, {self.above:+.1%})")
        elif self.taken.added_bytes is not None:
            said.append(f"adds {size(self.taken.added_bytes)} to its arguments")
        elif self.plan is not None:
            said.append(f"peak not measured (plan {size(self.plan.peak_bytes)})")
        planned = f" (plan {duration(self.plan.seconds)})" if self.plan is not None and self.timed else ""
        said.append(f"{duration(self.seconds)}{planned}{', with tracing and compilation' if self.first else ''}")
        return f"step {self.step}: {', '.join(said)}"


class Hint(NamedTuple):
    """Why what was measured parts from the plan, and what to do.

    Attributes:
        name: of the cause: "outside the step", "workspaces", "fragmentation", "out of room", "between steps", "slow".
        text: what was seen, and what to do.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def hints_of(readings: Sequence[Reading]) -> list[Hint]:
    """Name what parts from the plan in the last of some readings that lie side by side.

    Args:
        readings: of calls one after the other, of which the last has its memory measured.
    """
    last = readings[-1]
    return [*_memory_hints(last), *_allocator_hints(last, readings[0]), *_time_hints(readings)]


def _memory_hints(last: Reading) -> list[Hint]:
    """Name whose bytes are above the plan: those that were there before the step, or those that it adds."""
    plan, added = last.plan, last.taken.added_bytes
    if plan is None or added is None:
        return []
    least = max(APART * plan.peak_bytes, SMALL)
    said = f"peak {last.above:.0%} above plan"
    found = []
    before = last.taken.before_bytes
    if before is not None and before - plan.argument_bytes > least:
        found.append(
            Hint(
                "outside the step",
                f"{said}: {size(before - plan.argument_bytes)} are held beside the step's arguments, such as a second "
                "copy of the parameters, batches fetched ahead, or a model that was not donated to init",
            )
        )
    if added - plan.added_bytes > least:
        found.append(
            Hint(
                "workspaces",
                f"{said}: the step itself adds {size(added - plan.added_bytes)} more than planned: workspaces of "
                "kernels, or layouts that a compiler chose; docs/plan.md#how-true-it-is lists them",
            )
        )
    return found


def _allocator_hints(last: Reading, first: Reading) -> list[Hint]:
    """Name what a caching allocator does with memory that nobody asked for."""
    reserved, peak = last.taken.reserved_bytes, last.peak_bytes
    found = []
    if reserved is not None and peak is not None and reserved - peak > max(LOOSE * peak, SMALL):
        over = f"{reserved / last.plan.peak_bytes - 1:.0%} above plan" if last.plan is not None else "above its use"
        found.append(
            Hint(
                "fragmentation",
                f"the allocator holds {size(reserved)}, {over}, of which {size(reserved - peak)} were never used at "
                "once; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or call torch.cuda.empty_cache() behind "
                "init",
            )
        )
    if last.taken.retries > first.taken.retries:
        found.append(
            Hint(
                "out of room",
                f"the allocator gave back its cache {last.taken.retries - first.taken.retries} times to find room, and "
                "waited for the device each time; a smaller micro-batch or a higher stage needs less",
            )
        )
    return found


def _time_hints(readings: Sequence[Reading]) -> list[Hint]:
    """Name what takes more time than the plan, by the median of all calls that were not compiled."""
    usual = [r for r in readings if not r.first]
    if len(usual) < FEW:
        return []
    seconds, waited = (median(found) for found in zip(*[(r.seconds, r.taken.waited()) for r in usual], strict=True))
    found = []
    if waited > IDLE * (seconds + waited):
        found.append(
            Hint(
                "between steps",
                f"{duration(waited)} pass between two steps, {waited / (seconds + waited):.0%} of the time: batches, "
                "logs or checkpoints; fzero.data.batches(..., num_workers=4) loads ahead",
            )
        )
    plan = usual[-1].plan
    if plan is not None and usual[-1].timed and seconds > SLOW * plan.seconds:
        found.append(
            Hint(
                "slow",
                f"a step takes {duration(seconds)}, {seconds / plan.seconds:.1f} times what is planned; "
                "print(fzero.profile(step, ...)) shows where the time goes",
            )
        )
    return found


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
        *writers: of `fzero.observe`, such as `tensorboard("runs/gpt")`: they get each call's seconds, and the bytes of
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
    if type(every) is not int or every < 1:
        raise ValueError(f"every={every!r}: expected a number of calls, 1 or more")
    if type(first) is not int or first < 0:
        raise ValueError(f"first={first!r}: expected the number of a call, 0 or more")
    for writer in writers:
        if not callable(writer):
            raise TypeError(f"a writer is a function of rows, such as fzero.observe.jsonl(path), not {writer!r}")
    return Watched(step, writers, every, first, None if device is None else machine_of(device), say)


class Watched:
    """A step that is watched. Make it with `fzero.tuning.watch`; what else the step offers, it offers too.

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
