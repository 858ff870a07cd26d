"""Optimizers as (init, update) pairs."""

from fzero.optim._adam import AdamState, adam, adamw
from fzero.optim._base import Optimizer, apply_updates, chain
from fzero.optim._clip import clip_by_global_norm
from fzero.optim._leafwise import leafwise
from fzero.optim._schedules import Schedule, constant, warmup_cosine
from fzero.optim._sgd import SgdState, sgd
from fzero.segments import global_norm

__all__ = [
    "AdamState",
    "Optimizer",
    "Schedule",
    "SgdState",
    "adam",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "global_norm",
    "leafwise",
    "sgd",
    "warmup_cosine",
]
