"""Where a step goes wrong: what made the first nan, on which rank, at which line."""

from fzero.debug._nonfinite import nonfinite
from fzero.debug._report import Nonfinite, Origin

__all__ = ["Nonfinite", "Origin", "nonfinite"]
