"""Elements: the leaf, the block and the position of each element of a flat shard."""

from fzero.sharding.elements._block_ranges import UnitRange, block_range
from fzero.sharding.elements._element_ranges import put_elements, slice_elements
from fzero.sharding.elements._leaf_blocks import BlockMap, block_shape, block_spec, blocks_of_leaf, map_of_blocks
from fzero.sharding.elements._leaf_ids import (
    abstract,
    check_on_device,
    check_per_leaf,
    global_norm,
    leaf_ids,
    per_leaf,
    zero_padding,
)
from fzero.sharding.elements._leaf_positions import words_of_leaf, words_of_shard
from fzero.sharding.elements._leaf_subset import (
    empty_shape,
    gather_subset,
    places_of_subset,
    put_subset,
    scatter_subset,
    subset_spec,
)

__all__ = [
    "BlockMap",
    "UnitRange",
    "abstract",
    "block_range",
    "block_shape",
    "block_spec",
    "blocks_of_leaf",
    "check_on_device",
    "check_per_leaf",
    "empty_shape",
    "gather_subset",
    "global_norm",
    "leaf_ids",
    "map_of_blocks",
    "per_leaf",
    "places_of_subset",
    "put_elements",
    "put_subset",
    "slice_elements",
    "subset_spec",
    "words_of_leaf",
    "words_of_shard",
    "zero_padding",
]
