"""Find ranks that are slow: those that work longer than the others between their waits. Standard library only."""

from statistics import median
from typing import NamedTuple

__all__ = ["Pace", "Straggler", "Stragglers"]

_COMPARED_STEPS = 10  # that all ranks make in one comparison
_SLOW_FACTOR = 1.3  # a rank is slow if it works longer than the others by this factor
_MIN_EXTRA_SECONDS = 1e-3  # and by as many seconds a step
_PLACES = ("in the step", "between steps")


class Pace(NamedTuple):
    """How far a rank is, and how long it has worked until then, without its waits for other ranks.

    Attributes:
        step: how many steps it has begun.
        seconds: its seconds of work in each of `_PLACES`.
    """

    step: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)


class Straggler(NamedTuple):
    """A slow rank.

    Attributes:
        rank: the rank.
        host: the name of its host.
        where_slow: where it is slow, one of `_PLACES`.
        seconds: how long it works there, a step.
        others: how long the other ranks do, their median.
        since: the step since which it has been slow.
    """

    rank: int
    host: str
    where_slow: str
    seconds: float
    others: float
    since: int

    def __str__(self) -> str:
        factor = self.seconds / max(self.others, 1e-6)
        times = f"{factor:.1f} times as long as" if factor < 100 else "much longer than"
        return (
            f"rank {self.rank} ({self.host}) works {times} the others {self.where_slow}, "
            f"{1e3 * self.seconds:.1f} ms against {1e3 * self.others:.1f} ms, since step {self.since}"
        )


class Stragglers:
    """Compares the ranks each `_COMPARED_STEPS` steps. A rank is slow if it was so in two comparisons in a row.

    Attributes:
        slow_ranks: the ranks that were slow in the last two comparisons, each where it loses most.
    """

    def __init__(self) -> None:
        self.slow_ranks: list[Straggler] = []
        self._starts: dict[int, Pace] = {}
        self._since: dict[tuple[int, str], int] = {}  # rank and place -> the step since which it is slow

    def compare(self, paces: dict[int, Pace], hosts: dict[int, str]) -> bool:
        """Compare the ranks, if all have made `_COMPARED_STEPS` steps since the last time; return whether they have."""
        is_back = any(pace.step < self._starts[r].step for r, pace in paces.items() if r in self._starts)
        if self._starts.keys() != paces.keys() or is_back:  # back at a checkpoint
            self._starts = dict(paces)
            return False
        steps = {r: pace.step - self._starts[r].step for r, pace in paces.items()}
        if len(paces) < 2 or min(steps.values()) < _COMPARED_STEPS:
            return False
        candidates: list[Straggler] = []
        for i, place in enumerate(_PLACES):
            seconds = {r: (p.seconds[i] - self._starts[r].seconds[i]) / steps[r] for r, p in paces.items()}
            for rank, rank_seconds in seconds.items():
                median_seconds = median(x for r, x in seconds.items() if r != rank)
                if rank_seconds < _SLOW_FACTOR * median_seconds or rank_seconds < median_seconds + _MIN_EXTRA_SECONDS:
                    self._since.pop((rank, place), None)
                elif (rank, place) in self._since:
                    since = self._since[rank, place]
                    candidates.append(
                        Straggler(
                            rank=rank,
                            host=hosts[rank],
                            where_slow=place,
                            seconds=rank_seconds,
                            others=median_seconds,
                            since=since,
                        )
                    )
                else:
                    self._since[rank, place] = self._starts[rank].step
        self._starts = dict(paces)
        worst: dict[int, Straggler] = {}  # of each rank, where it loses most
        for slow in sorted(candidates, key=lambda x: x.seconds - x.others):
            worst[slow.rank] = slow
        self.slow_ranks = [*worst.values()]
        return True
