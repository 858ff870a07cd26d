"""The named schedules, a row each: the stages per rank that the laws try, and what a rank holds."""

from collections.abc import Callable
from typing import NamedTuple


class Counts(NamedTuple):
    """What a schedule is made for.

    Attributes:
        ranks: the ranks of the pipeline.
        micro_batches: the micro-batches of a step.
        stages: the stages per rank.
    """

    ranks: int
    micro_batches: int
    stages: int

    @property
    def group(self) -> int:
        """The size of the largest group of micro-batches that go round the ranks together, or one more."""
        return self.micro_batches // max(1, self.micro_batches // self.ranks) + 1


class Known(NamedTuple):
    """A named schedule.

    Attributes:
        stages: numbers of stages per rank that the laws try.
        in_flight: the forward passes in flight on rank r, in micro-batches: the formula of docs/schedules.md, which
            holds for many micro-batches.
        most: the most forward passes in flight on rank r, for any counts; None for the formula's, times the stages.
        messages: the messages of the page; None for those of stages that lie in a loop.
    """

    stages: tuple[int, ...]
    in_flight: Callable[[Counts, int], float]
    most: Callable[[Counts, int], float] | None = None
    messages: Callable[[Counts], int] | None = None

    def most_in_flight(self, counts: Counts, rank: int) -> float:
        """Return the most forward passes in flight on a rank, for any counts."""
        return self.most(counts, rank) if self.most else counts.stages * self.in_flight(counts, rank)

    def num_messages(self, counts: Counts) -> int:
        """Return the number of messages of a step."""
        ranks, m, v = counts
        return self.messages(counts) if self.messages else 2 * m * (v * ranks - 1)


TABLE = {
    "gpipe": Known((1, 2), lambda n, r: n.micro_batches),
    "1f1b": Known((1,), lambda n, r: n.ranks - r),
    "interleaved": Known(
        (2, 3),
        lambda n, r: (n.ranks * (n.stages + 1) - 2 * r - 1) / n.stages,
        most=lambda n, r: (n.stages - 1) * n.group + 2 * (n.ranks - 1 - r) + 1,
    ),
    "zb": Known(
        (1, 2),
        lambda n, r: n.ranks,
        most=lambda n, r: (
            n.stages * n.ranks if n.stages == 1 or n.micro_batches % n.ranks == 0 else n.stages * n.group + n.ranks
        ),
    ),
    "zbv": Known((2,), lambda n, r: n.ranks, messages=lambda n: 4 * n.micro_batches * (n.ranks - 1)),
}
KNOWN = [(name, stages) for name, row in TABLE.items() for stages in row.stages]
