"""Local SGD: groups of ranks train apart, and seldom average their parameters (DiLoCo)."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.local_sgd._local_steps import LocalSteps, local_steps
from fzero.local_sgd._replicas import LocalState, Replicas
from fzero.local_sgd._sync_schedule import SyncSchedule

__all__ = ["LocalState", "LocalSteps", "Replicas", "SyncSchedule", "local_steps"]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
