"""Units: the leaves of a tree that are sharded together."""

from fzero.sharding.units._unit_policy import UnitPolicy, UnitRow
from fzero.sharding.units._units import (
    ShardedUnit,
    assign_units,
    default_units,
    map_units,
    replace_unit,
    shard_axes,
    sharded_units,
)
from fzero.sharding.units._units_by_size import by_granularity, by_size

__all__ = [
    "ShardedUnit",
    "UnitPolicy",
    "UnitRow",
    "assign_units",
    "by_granularity",
    "by_size",
    "default_units",
    "map_units",
    "replace_unit",
    "shard_axes",
    "sharded_units",
]
