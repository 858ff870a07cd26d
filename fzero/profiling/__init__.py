"""Where the time of a step goes: by kind of work, by operation, and by source line."""

from fzero.profiling._lines import LineCost, Span
from fzero.profiling._profile import Cost, Profile, profile

__all__ = ["Cost", "LineCost", "Profile", "Span", "profile"]
