"""Moments in fewer bytes: in 8 bits with a scale for each block of elements, and in bfloat16."""

from fzero.optim.moments._moments import (
    EightBit,
    Moments,
    MomentsLike,
    SixteenBit,
    check_moment,
    init_moment,
    map_moments,
    moment_elements,
    moment_kind,
    read_moments,
)
from fzero.optim.moments._rounding import round_at_random

__all__ = [
    "EightBit",
    "Moments",
    "MomentsLike",
    "SixteenBit",
    "check_moment",
    "init_moment",
    "map_moments",
    "moment_elements",
    "moment_kind",
    "read_moments",
    "round_at_random",
]
