"""Local SGD: groups of ranks train apart, and seldom average their parameters (DiLoCo)."""

from fzero.local_sgd._local_steps import LocalSteps, local_steps
from fzero.local_sgd._replicas import LocalState, Replicas
from fzero.local_sgd._sync_schedule import SyncSchedule

__all__ = ["LocalState", "LocalSteps", "Replicas", "SyncSchedule", "local_steps"]
