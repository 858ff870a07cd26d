"""The search of a space of configurations: plans on several processes, from few blocks, the best ones first."""

from fzero.tuning.search._best_first import Unplanned, search_by_bounds
from fzero.tuning.search._search import (
    ConfigurationPlanner,
    PlanCache,
    Skipped,
    in_order,
    open_pool,
    refine,
    search_rows,
)

__all__ = [
    "ConfigurationPlanner",
    "PlanCache",
    "Skipped",
    "Unplanned",
    "in_order",
    "open_pool",
    "refine",
    "search_by_bounds",
    "search_rows",
]
