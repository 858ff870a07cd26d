"""plan_rows: search a space by one of two orders, then plan in full what decides about the best row."""

from collections.abc import Callable
from functools import partial

from fzero.tuning._row import TableRow
from fzero.tuning._search_space import Configuration, SearchSpace
from fzero.tuning.models import Bounds
from fzero.tuning.search._best_first import UnplannedConfiguration, search_by_bounds
from fzero.tuning.search._configuration_planner import ConfigurationPlanner
from fzero.tuning.search._plan_workers import open_pool
from fzero.tuning.search._search import SkippedConfiguration, refine, search_rows, sort_results

__all__ = ["plan_rows"]


def plan_rows(
    space: SearchSpace,
    planner: ConfigurationPlanner,
    budget_bytes: float,
    workers: int,
    bounds_of: Callable[[Configuration], Bounds] | None,
    max_rows: int | None,
    on_result: Callable[[TableRow | SkippedConfiguration], None] | None,
) -> tuple[list[TableRow], list[SkippedConfiguration], list[UnplannedConfiguration]]:
    """Plan the rows of a space on several processes.

    Args:
        space: the configurations.
        planner: plans one configuration.
        budget_bytes: the bytes that a rank may hold.
        workers: the number of processes.
        bounds_of: the bounds of a configuration, by which the search is ordered; None for a search by size.
        max_rows: the number of rows at which a search by bounds ends; None without `bounds_of`.
        on_result: called with each row and each configuration that is skipped; None for no call.

    Returns:
        The rows, the configurations that were skipped, and those that the search did not come to.
    """
    if max_rows is None or bounds_of is None:
        search = partial(search_rows, space, workers=workers, budget_bytes=budget_bytes)
    else:
        search = partial(search_by_bounds, space, budget_bytes=budget_bytes, bounds_of=bounds_of, max_rows=max_rows)
    results: list[TableRow | SkippedConfiguration] = []
    unplanned: list[UnplannedConfiguration] = []
    with open_pool(workers, planner, planner.cached) as start:
        for x in search(start=start):
            if isinstance(x, UnplannedConfiguration):
                unplanned.append(x)
                continue
            results.append(x)
            if on_result is not None:
                on_result(x)
        rows, skipped = sort_results(space, results, budget_bytes)
        return refine(rows, start, budget_bytes), skipped, unplanned
