"""A schedule is data: what each rank does, in order, and where each pipeline stage lives."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fzero._notebook import shown
from fzero.parallel.schedules._actions import GROWTH, Action, Message, makes
from fzero.parallel.schedules._check import check
from fzero.parallel.schedules._drawing import draw, text
from fzero.parallel.schedules._parse import Table, in_cells, rows_of
from fzero.parallel.schedules._timing import Durations, Timing, timed

__all__ = ["Schedule"]


@dataclass(frozen=True, repr=False)
class Schedule:
    """A pipeline schedule as data: a table of actions, a row for each rank.

    `schedule` makes the known ones, `greedy` others, and `Schedule.parse` reads tables of torch's form. One of your
    own is a literal; `check` says whether it can be run. `print` draws it in text, and `plot` as a picture.

    Attributes:
        rows: each rank's actions, in its order.
        home: by pipeline stage, the rank that holds it.
        name: what it is called in titles and errors.

    Example:
        >>> F, B = [Action("F", 0, m) for m in range(2)], [Action("B", 0, m) for m in range(2)]
        >>> Schedule([[*F, *B]], home=[0])
        Schedule('by hand': 1 rank, 1 stage, 2 micro-batches)
    """

    rows: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]
    name: str = "by hand"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple([tuple(row) for row in self.rows]))
        object.__setattr__(self, "home", tuple(self.home))

    @classmethod
    def parse(cls, table: Table, name: str = "parsed") -> "Schedule":
        """Read a table of the form that torch.distributed.pipelining has.

        A cell is a stage, a kind and a micro-batch, as in `0F1`. An empty one is a bubble. `(0F1;3B0)OVERLAP_F_B` is
        read as two actions, one after the other. Actions that send, receive, unshard, reshard or reduce are left out:
        who sends what follows from the order, and when ZeRO gathers and reduces is said by `fzero.shard`.

        Args:
            table: CSV with a line for each rank, or the path of such a file. Or rows of cells, also in a dict by rank.
                A cell is a text, None, or what prints as such a text, as torch's actions do.
            name: the name of the schedule.

        Raises:
            ValueError: if a cell cannot be read, a stage has actions on two ranks or none, or `check` refuses the
                table. It refuses torch 2.13's own table of 1F1B, whose last rank leaves micro-batch 0 out.

        Example:
            >>> print(Schedule.parse([["0F0", "0F1", None, "0B0", None, "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]]))
            parsed: 2 ranks, 2 micro-batches; efficiency 0.667; in flight 2, 1
            rank 0  F0 F1  .  . B0 --  . B1 --
            rank 1   . F0 B0 -- F1 B1 --  .  .
        """
        schedule = cls(*rows_of(table), name)
        check(schedule)
        return schedule

    def to_csv(self) -> str:
        """Write the table as CSV, a line for each rank, as torch's schedules load it and `parse` reads it."""
        return in_cells(self)

    @property
    def ranks(self) -> int:
        """Return how many ranks the pipeline has."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Return how many pipeline stages there are, on all ranks together."""
        return len(self.home)

    @cached_property
    def micro_batches(self) -> int:
        """Return how many micro-batches go through the pipeline: as many as its first stage runs forward."""
        return len({a.micro_batch for row in self.rows for a in row if a.kind == "F" and a.stage == 0})

    def in_flight(self, rank: int) -> int:
        """Return the most forward passes of a rank whose residuals are alive at once.

        A residual lives from its stage's forward pass to the end of the backward pass, its weight half included. A
        rank that holds v stages counts a micro-batch up to v times, each with the residuals of one stage.
        """
        alive = most = 0
        for action in self.rows[rank]:
            alive += GROWTH[action.kind]
            most = max(most, alive)
        return most

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Return who sends what to whom, rank by rank, in the order of each sender.

        Between stages of one rank nothing is sent.
        """
        found = []
        for rank, row in enumerate(self.rows):
            for made in filter(None, map(makes, row)):
                to = made.stage + (1 if made.kind == "F" else -1)
                if 0 <= to < self.stages and self.home[to] != rank:
                    found.append(Message(rank, self.home[to], *made))
        return tuple(found)

    def timing(
        self,
        forward: float = 1.0,
        backward: float = 2.0,
        weight: float = 1.0,
        hop: float = 0.0,
        cost: Sequence[float] | None = None,
    ) -> Timing:
        """Return when each action starts and ends, if each starts as soon as its rank and what it needs are there.

        Durations are those of a rank's share of the model, 1/ranks of it, for one micro-batch, in any unit. A pipeline
        stage takes its part of it: half, where ranks hold two. So makespans of schedules of one model compare.

        Args:
            forward: of a forward pass.
            backward: of a whole backward pass.
            weight: of the weight half of a backward pass; its input half takes the rest.
            hop: of a message between ranks.
            cost: by stage, how heavy it is; 1 is a stage of the mean weight.

        Raises:
            ValueError: if the schedule cannot be run (see `check`), or a duration is none.
        """
        check(self)
        return timed(self, Durations.of(self.ranks, self.stages, forward, backward, weight, hop, cost))

    def plot(
        self, path: str | os.PathLike[str] | None = None, beside: "Iterable[Schedule]" = (), **durations: Any
    ) -> Any:
        """Draw the schedule as people draw it: ranks down, time across, bubbles empty (matplotlib).

        A box is an action, with the number of its micro-batch where there is room. Beside each rank stands what it has
        in flight (`in_flight`), in micro-batches: one counts as all stages of the rank together.

        Args:
            path: of an image file to write: its ending says the format, such as ".png" or ".svg".
            beside: further schedules, drawn below on the same clock.
            **durations: those of `timing`.

        Returns:
            The figure.

        Raises:
            ValueError: if a schedule cannot be run (see `check`).
        """
        schedules = [self, *beside]
        figure = draw(schedules, [s.timing(**durations) for s in schedules])
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def _repr_html_(self) -> str:
        return shown(repr(self), "the schedule: ranks down, time across", self.plot)

    def __repr__(self) -> str:
        counts = ((self.ranks, "rank"), (self.stages, "stage"), (self.micro_batches, "micro-batch"))
        words = [f"{n} {word}{'' if n == 1 else 'es' if word.endswith('h') else 's'}" for n, word in counts]
        return f"Schedule({self.name!r}: {', '.join(words)})"

    def __str__(self) -> str:
        return text(self)
