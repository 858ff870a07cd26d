"""Readings: what a step took, beside what its plan says; and what it means where the two part."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fzero.graph.plan._plan import Plan
from fzero.graph.plan._text import size
from fzero.tuning._meters import Taken
from fzero.tuning._table_text import duration

__all__ = ["Hint", "Reading", "hints_of"]

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
        """Return what was measured and planned by name, as writers of `fzero.metrics` take it. Waits for the device."""
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
