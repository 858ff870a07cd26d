"""Maps of units: a unit as one flat buffer, and how its gathers and sums send it, in numbers or in codes."""

from fzero.sharding.maps._coded import decode_shard, encode_shard
from fzero.sharding.maps._flat import flatten_by_copies, flatten_leaves, view_leaves
from fzero.sharding.maps._unit_maps import apply_over_unit_axes, apply_to_unit, gather_flat, gather_unit

__all__ = [
    "apply_over_unit_axes",
    "apply_to_unit",
    "decode_shard",
    "encode_shard",
    "flatten_by_copies",
    "flatten_leaves",
    "gather_flat",
    "gather_unit",
    "view_leaves",
]
