"""Search a space by bounds: plan the configurations that may be fastest, and say how fast the others may be."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fzero.tuning._row import TableRow
from fzero.tuning._search_space import Configuration, SearchSpace
from fzero.tuning.models import Bounds
from fzero.tuning.search._search import SkippedConfiguration, StartPlan, is_surely_too_large

__all__ = ["UnplannedConfiguration", "search_by_bounds"]

_AT_ONCE = 4  # a fixed number, so that the results do not depend on the number of processes


class UnplannedConfiguration(NamedTuple):
    """A configuration that was not planned, with what it takes and holds at least.

    Attributes:
        config: the configuration.
        bounds: the least seconds of its step, and the least bytes of a rank.
    """

    config: Configuration
    bounds: Bounds


def search_by_bounds(
    space: SearchSpace,
    start: StartPlan,
    budget_bytes: float,
    bounds_of: Callable[[Configuration], Bounds],
    max_rows: int,
) -> Iterator[TableRow | SkippedConfiguration | UnplannedConfiguration]:
    """Plan the configurations with the least bounds of seconds, until no other can be faster than the best that fits.

    If none has room by its bound, the one with the least bytes is planned, so that there is a row to explain.

    Args:
        space: the configurations.
        start: begins to plan a configuration.
        budget_bytes: the bytes that a rank may hold.
        bounds_of: the bounds of a configuration.
        max_rows: the number of rows at which the search ends.
    """
    order = sorted([UnplannedConfiguration(c, bounds_of(c)) for c in space], key=lambda x: x.bounds.seconds)
    rows: list[TableRow] = []
    if all(x.bounds.bytes > budget_bytes for x in order):
        smallest = min(order, key=lambda x: x.bounds.bytes)
        order.remove(smallest)
        rows.append(start(smallest.config).result())
        yield rows[0]
    while order:
        planned: list[Configuration] = []
        fastest = min([row.seconds for row in rows if row.peak_bytes <= budget_bytes], default=math.inf)
        while order and len(planned) < min(_AT_ONCE, max_rows - len(rows)):
            x = order.pop(0)
            too_large = [r.config for r in rows if is_surely_too_large(r, budget_bytes)]
            smaller = next((c for c in too_large if x.config.holds_no_less_than(c)), None)
            if x.bounds.bytes > budget_bytes or x.bounds.seconds >= fastest:
                yield x
            elif smaller is not None:
                yield SkippedConfiguration(x.config, smaller)
            else:
                planned.append(x.config)
        if not planned:
            yield from order
            return
        for future in [start(config) for config in planned]:
            rows.append(future.result())
            yield rows[-1]
