"""The search of a space of configurations: plans on several processes, from few blocks, the best ones first."""

from fzero.tuning.search._best_first import Unplanned, search_by_bounds
from fzero.tuning.search._search import (
    ConfigurationPlanner,
    PlanCache,
    Skipped,
    open_pool,
    refine,
    search_rows,
    sort_results,
)

__all__ = [
    "ConfigurationPlanner",
    "PlanCache",
    "Skipped",
    "Unplanned",
    "open_pool",
    "refine",
    "search_by_bounds",
    "search_rows",
    "sort_results",
]
