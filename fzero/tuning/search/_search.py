"""Plan the configurations of a space on several processes, and skip those that need no plan."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from fzero.tuning._row import TableRow
from fzero.tuning._search_space import Configuration, SearchSpace

__all__ = ["SkippedConfiguration", "StartPlan", "is_surely_too_large", "refine", "search_rows", "sort_results"]


_FULL_ROWS = 3  # how many of the fastest rows that fit are planned as they are
_BUDGET_TOLERANCE = 1.05  # an extrapolated row decides nothing if it exceeds the budget by less than this factor

StartPlan = Callable[[Configuration | TableRow], Future[TableRow]]


class SkippedConfiguration(NamedTuple):
    """A configuration that was not planned, since it holds no less than another that does not fit.

    Attributes:
        config: the configuration that was not planned.
        smaller: a planned one whose parameters, optimizer state and activations alone exceed the budget.
    """

    config: Configuration
    smaller: Configuration


def search_rows(
    space: SearchSpace, start: StartPlan, workers: int, budget_bytes: float
) -> Iterator[TableRow | SkippedConfiguration]:
    """Plan a space, the smallest configurations first. Skip those that hold no less than one that does not fit.

    A free process does not wait: it begins with a configuration that may be skipped later. The row of such a
    configuration is then left out. So the set of results does not depend on the number of processes; their order does.

    Args:
        space: the configurations.
        start: begins to plan a configuration.
        workers: how many configurations are planned at once.
        budget_bytes: the bytes that a rank may hold.
    """
    order = [*space]
    smaller_configs = {c: [x for x in order[:i] if c.holds_no_less_than(x)] for i, c in enumerate(order)}
    too_large: dict[Configuration, bool] = {}  # of the configurations that are decided
    pending_rows: dict[Configuration, Future[TableRow]] = {}
    while len(too_large) < len(order):
        undecided = [c for c in order if c not in too_large]
        for c in undecided:
            smaller = next((x for x in smaller_configs[c] if too_large.get(x)), None)
            if smaller is not None:
                too_large[c] = False  # a larger one is skipped by `smaller` as well
                yield SkippedConfiguration(c, smaller)
            elif c in pending_rows and pending_rows[c].done() and all(x in too_large for x in smaller_configs[c]):
                row = pending_rows[c].result()
                too_large[c] = is_surely_too_large(row, budget_bytes)
                yield row
        undecided = [c for c in undecided if c not in too_large]
        fresh = [c for c in undecided if c not in pending_rows]
        running = [f for f in pending_rows.values() if not f.done()]
        fresh.sort(key=lambda c: not all(x in too_large for x in smaller_configs[c]))
        for c in fresh[: workers - len(running)]:
            pending_rows[c] = start(c)
            running.append(pending_rows[c])
        wait(running, return_when=FIRST_COMPLETED)


def sort_results(
    space: SearchSpace, results: Iterable[TableRow | SkippedConfiguration], budget_bytes: float
) -> tuple[list[TableRow], list[SkippedConfiguration]]:
    """Put rows and skipped configurations in the order of the space, the latter with the first smaller one."""
    order_in_space = {c: i for i, c in enumerate(space)}
    parts = sorted(results, key=lambda x: order_in_space[x.config])
    rows = [x for x in parts if isinstance(x, TableRow)]
    large = [r.config for r in rows if is_surely_too_large(r, budget_bytes)]
    skipped = [x.config for x in parts if isinstance(x, SkippedConfiguration)]
    return rows, [SkippedConfiguration(c, next(x for x in large if c.holds_no_less_than(x))) for c in skipped]


def is_surely_too_large(row: TableRow, budget_bytes: float) -> bool:
    """Return whether the least peak of a row exceeds the budget, that of an extrapolated row by a margin."""
    return row.min_peak_bytes > budget_bytes * (1 if row.in_full else _BUDGET_TOLERANCE)


def refine(rows: Sequence[TableRow], start: StartPlan, budget_bytes: float) -> list[TableRow]:
    """Plan rows in full until none that decides about the best row is extrapolated.

    These are the fastest three rows that fit, rows as fast that nearly fit, and the smallest row if nothing fits.
    """
    rows = list(rows)
    while rough := [r for r in _deciding_rows(rows, budget_bytes) if not r.in_full]:
        exact = {future.result().config: future.result() for future in [start(r) for r in rough]}
        rows = [exact.get(r.config, r) for r in rows]
    return rows


def _deciding_rows(rows: Sequence[TableRow], budget_bytes: float) -> list[TableRow]:
    """List the rows that decide about the best one, as `refine` describes them."""
    fitting_rows = sorted([r for r in rows if r.peak_bytes <= budget_bytes], key=lambda r: r.seconds)[:_FULL_ROWS]
    slowest = fitting_rows[-1].seconds if len(fitting_rows) == _FULL_ROWS else math.inf
    deciding = [
        r for r in rows if budget_bytes < r.peak_bytes <= _BUDGET_TOLERANCE * budget_bytes and r.seconds <= slowest
    ]
    return [*fitting_rows, *deciding] if fitting_rows else [*deciding, *sorted(rows, key=lambda r: r.peak_bytes)[:1]]
