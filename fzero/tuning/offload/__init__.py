"""The ratio of offload: the smallest that fits, and the seconds that each costs."""

from fzero.tuning.offload._offload_costs import OffloadCosts, offload_costs
from fzero.tuning.offload._offload_work import OffloadWork, model_work, planned_work
from fzero.tuning.offload._ratio import OffloadRatio, RatioTrial, offload_ratio

__all__ = [
    "OffloadCosts",
    "OffloadRatio",
    "OffloadWork",
    "RatioTrial",
    "model_work",
    "offload_costs",
    "offload_ratio",
    "planned_work",
]
