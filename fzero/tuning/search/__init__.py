"""The search of a space of configurations: plans on several processes, from few blocks, the best ones first."""

from fzero.tuning.search._best_first import UnplannedConfiguration, search_by_bounds
from fzero.tuning.search._configuration_planner import ConfigurationPlanner
from fzero.tuning.search._plan_rows import plan_rows
from fzero.tuning.search._plan_workers import open_pool
from fzero.tuning.search._row_cache import RowCache
from fzero.tuning.search._search import SkippedConfiguration, search_rows, sort_results

__all__ = [
    "ConfigurationPlanner",
    "RowCache",
    "SkippedConfiguration",
    "UnplannedConfiguration",
    "open_pool",
    "plan_rows",
    "search_by_bounds",
    "search_rows",
    "sort_results",
]
