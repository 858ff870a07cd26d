"""A schedule as data: each rank's actions in order, and the rank of each pipeline stage."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fzero._arguments import check_path
from fzero._report import FigureReport
from fzero._tracebacks import api_boundary
from fzero.parallel.schedules._actions import IN_FLIGHT_CHANGE, Action, Message, action_output, stages_on
from fzero.parallel.schedules._drawing import draw, text
from fzero.parallel.schedules._simulation import check
from fzero.parallel.schedules._timing import Durations, Timing, time_schedule
from fzero.parallel.schedules._torch_tables import ScheduleTable, format_csv, parse_rows

__all__ = ["PipelineSchedule"]


@dataclass(frozen=True, repr=False)
class PipelineSchedule(FigureReport):
    """A pipeline schedule as data: a table of actions with one row per rank.

    `schedule` makes named schedules, `greedy` makes others, and `PipelineSchedule.parse` reads tables in torch's
    format. Write your own as a literal, and check with `check` that it can run. `print` draws it as text, and `plot`
    as a picture.

    Attributes:
        rows: each rank's actions, in order.
        rank_of_stage: by pipeline stage, the rank that holds it.
        name: its name in titles and errors.

    Example:
        >>> F, B = [Action("F", 0, m) for m in range(2)], [Action("B", 0, m) for m in range(2)]
        >>> PipelineSchedule([[*F, *B]], rank_of_stage=[0])
        PipelineSchedule('by hand': 1 rank, 1 stage, 2 micro-batches)
    """

    rows: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]
    name: str = "by hand"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple([tuple(row) for row in self.rows]))
        object.__setattr__(self, "rank_of_stage", tuple(self.rank_of_stage))

    @classmethod
    @api_boundary
    def parse(cls, table: ScheduleTable, name: str = "parsed") -> "PipelineSchedule":
        """Read a table in the format of torch.distributed.pipelining.

        A cell is a stage, a kind and a micro-batch, as in `0F1`. An empty cell is a bubble. `(0F1;3B0)OVERLAP_F_B` is
        read as two actions, one after the other. Actions that send, receive, unshard, reshard or reduce are skipped:
        messages follow from the order, and `fzero.shard` sets when ZeRO gathers and reduces.

        Args:
            table: CSV with one line per rank, or the path of such a file. Or rows of cells, or a dict of rows by rank.
                A cell is a string, None, or an object that prints as such a string, as torch's actions do.
            name: the name of the schedule.

        Raises:
            TypeError: if it is no table, or a row is no list of cells.
            ValueError: if a cell cannot be read, a stage has actions on two ranks or on none, or `check` refuses the
                table. It refuses torch 2.13's own table of 1F1B, whose last rank skips micro-batch 0.

        Example:
            >>> print(
            ...     PipelineSchedule.parse([["0F0", "0F1", None, "0B0", None, "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]])
            ... )
            parsed: 2 ranks, 2 micro-batches; efficiency 0.667; in flight 2, 1
            rank 0  F0 F1  .  . B0 --  . B1 --
            rank 1   . F0 B0 -- F1 B1 --  .  .
        """
        schedule = cls(*parse_rows(table), name)
        check(schedule)
        return schedule

    def to_csv(self) -> str:
        """Write the table as CSV, one line per rank, as torch's schedules load it and `parse` reads it."""
        return format_csv(self)

    @property
    def ranks(self) -> int:
        """Return the number of ranks in the pipeline."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages, on all ranks together."""
        return len(self.rank_of_stage)

    @cached_property
    def micro_batches(self) -> int:
        """Return the number of micro-batches: those that the first stage runs forward."""
        return len({a.micro_batch for row in self.rows for a in row if a.kind == "F" and a.stage == 0})

    def stages_on(self, rank: int) -> list[int]:
        """List the pipeline stages that a rank holds."""
        return stages_on(rank, self.rank_of_stage)

    def in_flight(self, rank: int) -> int:
        """Return the most forward passes of a rank whose residuals are in flight at once.

        A residual lives from its stage's forward pass to the end of the backward pass, including its weight half. A
        rank that holds v stages counts a micro-batch up to v times, each time with the residuals of one stage.
        """
        in_flight = peak = 0
        for action in self.rows[rank]:
            in_flight += IN_FLIGHT_CHANGE[action.kind]
            peak = max(peak, in_flight)
        return peak

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Return all messages between ranks, grouped by sender and in the sender's order.

        Nothing is sent between stages of the same rank.
        """
        messages = []
        for rank, row in enumerate(self.rows):
            for value in filter(None, map(action_output, row)):
                target_stage = value.stage + (1 if value.kind == "F" else -1)
                if 0 <= target_stage < self.stages and self.rank_of_stage[target_stage] != rank:
                    messages.append(Message(rank, self.rank_of_stage[target_stage], *value))
        return tuple(messages)

    def timing(
        self,
        forward: float = 1.0,
        backward: float = 2.0,
        weight: float = 1.0,
        latency: float = 0.0,
        cost: Sequence[float] | None = None,
        sends_early: bool = False,
    ) -> Timing:
        """Return the start and end of each action, if each starts as soon as its rank and its inputs are ready.

        Durations are those of a rank's share of the model, 1/ranks of it, for one micro-batch, in any unit. A pipeline
        stage takes its part of that: half, if a rank holds two. So makespans of schedules of one model are comparable.

        Args:
            forward: the duration of a forward pass.
            backward: the duration of a full backward pass.
            weight: the duration of its weight half; its input half takes the rest.
            latency: the duration of a message between ranks.
            cost: by stage, its relative cost; 1 is a stage of mean cost.
            sends_early: whether a full backward pass sends the gradient of its input before its weight half.

        Raises:
            ValueError: if the schedule cannot run (see `check`), or a duration is invalid.
        """
        check(self)
        durations = Durations.of(self.ranks, self.stages, forward, backward, weight, latency, cost)
        return time_schedule(self, replace(durations, sends_early=sends_early))

    def plot(
        self, path: str | os.PathLike[str] | None = None, beside: "Iterable[PipelineSchedule]" = (), **durations: Any
    ) -> Any:
        """Draw the schedule in the usual way with matplotlib: one row per rank, time from left to right, empty bubbles.

        A bar is an action, with the number of its micro-batch if there is room. Next to each rank stands the most that
        it has in flight (`in_flight`), in micro-batches: one counts as all stages of the rank together.

        Args:
            path: the path of an image file to write; its suffix sets the format, such as ".png" or ".svg".
            beside: other schedules, drawn below on the same time axis.
            **durations: the durations of `timing`.

        Returns:
            The figure.

        Raises:
            ValueError: if a schedule cannot run (see `check`).
        """
        if path is not None:
            check_path("path", path, "the path of an image file, such as 'schedule.png'")
        schedules = [self, *beside]
        figure = draw(schedules, [s.timing(**durations) for s in schedules])
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    _caption = "the schedule: one row per rank, time from left to right"

    def _draw_figure(self) -> Any:
        return self.plot()

    def _notebook_text(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        counts = (
            (self.ranks, "rank", "ranks"),
            (self.stages, "stage", "stages"),
            (self.micro_batches, "micro-batch", "micro-batches"),
        )
        words = [f"{n} {singular if n == 1 else plural}" for n, singular, plural in counts]
        return f"PipelineSchedule({self.name!r}: {', '.join(words)})"

    def __str__(self) -> str:
        return text(self)
