"""Liveness: a heartbeat beside each rank, which tells a slow rank from a lost one, and names the lost one."""

from fzero._liveness._heart import (
    Heart,
    LostRankError,
    current_heart,
    keep_heart,
    lost_rank_error_of,
    resume_at,
    start_heart,
    step_place,
)

__all__ = ["LostRankError"]

# For other packages of fzero only. They may change in any release.
INTERNAL = ["Heart", "current_heart", "lost_rank_error_of", "keep_heart", "resume_at", "start_heart", "step_place"]
