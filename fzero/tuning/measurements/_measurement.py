"""Measurements of a step beside its plan, and the hints that explain their differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fzero._format import format_bytes, format_seconds
from fzero.graph import Plan
from fzero.tuning.measurements._hint import Hint
from fzero.tuning.measurements._meter import Measurement

__all__ = ["StepMeasurement", "find_hints"]


_PEAK_TOLERANCE = 0.05  # hint at a peak that exceeds its plan by more than this share


_RESERVED_TOLERANCE = 0.10  # hint at reserved bytes that exceed the peak by more than this share


_IDLE_SHARE = 0.10  # hint at idle time between steps above this share


_SLOW_FACTOR = 1.3  # hint at a step slower than its plan by this factor


_MIN_CALLS = 3  # calls that a median needs at least


_MIN_BYTES = 1 << 20  # smaller differences deserve no hint


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
        plan = f" (plan {format_seconds(self.plan.seconds)})" if self.plan is not None and self.has_machine else ""
        parts.append(
            f"{format_seconds(self.seconds)}{plan}{', with tracing and compilation' if self.has_compilation else ''}"
        )
        return f"step {self.step}: {', '.join(parts)}"


def find_hints(measurements: Sequence[StepMeasurement]) -> list[Hint]:
    """List hints for the last of some consecutive measurements.

    Args:
        measurements: measurements of consecutive calls. The memory of the last call was measured.
    """
    last = measurements[-1]
    return [*_memory_hints(last), *_allocator_hints(last, measurements[0]), *_time_hints(measurements)]


def _memory_hints(last_step: StepMeasurement) -> list[Hint]:
    """Return hints if the bytes before the step, or those that it adds, exceed the plan."""
    plan, added_bytes = last_step.plan, last_step.measurement.added_bytes
    if plan is None or added_bytes is None:
        return []
    tolerance = max(_PEAK_TOLERANCE * plan.peak_bytes, _MIN_BYTES)
    prefix = f"peak {last_step.above:.0%} above plan"
    hints = []
    before = last_step.measurement.before_bytes
    outside = 0 if before is None else before - plan.argument_bytes
    workspace = min(max(outside, 0), plan.workspace_bytes)  # the rest of it is taken in this step
    outside, extra_bytes = outside - workspace, added_bytes - plan.added_bytes - (plan.workspace_bytes - workspace)
    if outside > tolerance:
        hints.append(
            Hint(
                "outside the step",
                f"{prefix}: {format_bytes(outside)} are held besides the step's arguments, such as a "
                "second copy of the parameters, batches fetched ahead, or a model that was not donated to init",
            )
        )
    if extra_bytes > tolerance:
        hints.append(
            Hint(
                "workspaces",
                f"{prefix}: the step itself adds {format_bytes(extra_bytes)} more than planned: workspaces of "
                "kernels, or layouts that a compiler chose; docs/plan.md#how-true-it-is lists them",
            )
        )
    return hints


def _planned_reserve(plan: Plan | None) -> str:
    """Say what the allocator would hold for the step alone, with both kinds of segments."""
    if plan is None or plan.device_type != "cuda":
        return ""
    fixed_reserve, expandable_reserve = [
        format_bytes(plan.allocator_peaks(expandable_segments=x).reserved_bytes) for x in (False, True)
    ]
    return f" (by the plan the step alone reserves {fixed_reserve}, or {expandable_reserve} with expandable segments)"


def _allocator_hints(last_step: StepMeasurement, first_step: StepMeasurement) -> list[Hint]:
    """Return hints on fragmentation and retries of the caching allocator."""
    reserved_bytes, peak = last_step.measurement.reserved_bytes, last_step.peak_bytes
    hints = []
    if (
        reserved_bytes is not None
        and peak is not None
        and reserved_bytes - peak > max(_RESERVED_TOLERANCE * peak, _MIN_BYTES)
    ):
        plan = last_step.plan
        excess_text = "above its use" if plan is None else f"{reserved_bytes / plan.peak_bytes - 1:.0%} above plan"
        hints.append(
            Hint(
                "fragmentation",
                f"the allocator holds {format_bytes(reserved_bytes)}, {excess_text}, of which "
                f"{format_bytes(reserved_bytes - peak)} were never used at once{_planned_reserve(plan)}; set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or call torch.accelerator.empty_cache() after init",
            )
        )
    retries = last_step.measurement.retries - first_step.measurement.retries
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
    if len(steady) < _MIN_CALLS:
        return []
    seconds, idle = (
        median(values) for values in zip(*[(r.seconds, r.measurement.idle_seconds()) for r in steady], strict=True)
    )
    hints = []
    if idle > _IDLE_SHARE * (seconds + idle):
        hints.append(
            Hint(
                "between steps",
                f"{format_seconds(idle)} pass between two steps, {idle / (seconds + idle):.0%} of the time: batches, "
                "logs or checkpoints; fzero.data.batches(..., num_workers=4) loads ahead",
            )
        )
    plan = steady[-1].plan
    if plan is not None and steady[-1].has_machine and seconds > _SLOW_FACTOR * plan.seconds:
        hints.append(
            Hint(
                "slow",
                f"a step takes {format_seconds(seconds)}, {seconds / plan.seconds:.1f} times the planned time; "
                "print(fzero.profile(step, ...)) shows where the time goes",
            )
        )
    return hints
