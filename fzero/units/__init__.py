"""Units by size: rules for `fzero.shard(units=)`, made of a tree's paths and its leaves' sizes."""

from fzero.units._granularity import by_granularity
from fzero.units._rule import UnitPolicy, UnitRow
from fzero.units._size import by_size

__all__ = ["UnitPolicy", "UnitRow", "by_granularity", "by_size"]
