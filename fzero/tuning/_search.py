"""Planning the configurations of a space: which need no plan, and how the others are planned, on several processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from fzero.tuning._row import Row
from fzero.tuning._space import Configuration, Space

__all__ = ["Skipped", "Start", "in_order", "refined", "rows_of"]

IN_FULL = 3  # how many of the fastest that fit are planned as they are

Start = Callable[[Configuration | Row], Future[Row]]


class Skipped(NamedTuple):
    """A configuration that was not planned, since it holds no less than one that does not fit.

    Attributes:
        config: that was not planned.
        as_little_as: one that was, whose parameters, state and activations alone are too much.
    """

    config: Configuration
    as_little_as: Configuration


def rows_of(space: Space, start: Start, workers: int, budget: float) -> Iterator[Row | Skipped]:
    """Plan a space, those that hold least first. What holds no less than one that does not fit is skipped.

    A free process begins with what may come to be skipped, rather than wait; its row is then left out. So what is
    yielded does not depend on the number of processes. Its order does.

    Args:
        space: of configurations.
        start: begins to plan one.
        workers: how many are planned at once.
        budget: bytes that a rank may hold.
    """
    order = [*space]
    leaner = {c: [x for x in order[:i] if c.holds_no_less_than(x)] for i, c in enumerate(order)}
    too_large: dict[Configuration, bool] = {}  # of those that are decided
    started: dict[Configuration, Future[Row]] = {}
    while len(too_large) < len(order):
        left = [c for c in order if c not in too_large]
        for c in left:
            known = next((x for x in leaner[c] if too_large.get(x)), None)
            if known is not None:
                too_large[c] = False  # what holds no less than this one holds no less than that
                yield Skipped(c, known)
            elif c in started and started[c].done() and all(x in too_large for x in leaner[c]):
                row = started[c].result()
                too_large[c] = row.at_least > budget
                yield row
        left = [c for c in left if c not in too_large]
        fresh = [c for c in left if c not in started]
        running = [f for f in started.values() if not f.done()]
        for c in sorted(fresh, key=lambda c: not all(x in too_large for x in leaner[c]))[: workers - len(running)]:
            started[c] = start(c)
            running.append(started[c])
        wait(running, return_when=FIRST_COMPLETED)


def in_order(space: Space, found: Iterable[Row | Skipped], budget: float) -> tuple[list[Row], list[Skipped]]:
    """Put rows, and what was skipped, in the order of the space, each of these beside the first that says why."""
    place = {c: i for i, c in enumerate(space)}
    parts = sorted(found, key=lambda x: place[x.config])
    rows = [x for x in parts if isinstance(x, Row)]
    large = [r.config for r in rows if r.at_least > budget]
    skipped = [x.config for x in parts if isinstance(x, Skipped)]
    return rows, [Skipped(c, next(x for x in large if c.holds_no_less_than(x))) for c in skipped]


def refined(rows: Sequence[Row], start: Start, budget: float) -> list[Row]:
    """Plan in full the fastest rows that fit, until the first three are; the best is always one of them."""
    rows = list(rows)
    while True:
        first = sorted([r for r in rows if r.peak_bytes <= budget], key=lambda r: r.seconds)[:IN_FULL]
        rough = [r for r in first if not r.in_full]
        if not rough:
            return rows
        exact = {future.result().config: future.result() for future in [start(r) for r in rough]}
        rows = [exact.get(r.config, r) for r in rows]
