"""Liveness: a heartbeat beside each rank, which tells a slow rank from a lost one, and names the lost one."""

from fzero._liveness._heartbeat_client import (
    HeartbeatClient,
    LostRankError,
    current_heartbeat,
    find_lost_rank_error,
    publish_step,
    register_heartbeat,
    resume_at,
    start_heartbeat,
)

__all__ = ["LostRankError"]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "HeartbeatClient",
    "current_heartbeat",
    "find_lost_rank_error",
    "publish_step",
    "register_heartbeat",
    "resume_at",
    "start_heartbeat",
]
