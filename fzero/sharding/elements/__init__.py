"""Elements: the leaf, the block and the position of each element of a flat shard."""

from fzero.sharding.elements._block_ranges import UnitRange, block_range
from fzero.sharding.elements._element_ranges import put_elements, slice_elements
from fzero.sharding.elements._leaf_blocks import BlockMap, block_shape, block_spec, leaf_blocks, shard_block_map
from fzero.sharding.elements._leaf_ids import (
    abstract,
    check_on_device,
    check_per_leaf,
    global_norm,
    leaf_ids,
    per_leaf,
    zero_padding,
)
from fzero.sharding.elements._leaf_positions import key_beside, leaf_bits, shard_bits
from fzero.sharding.elements._leaf_subset import (
    empty_shape,
    gather_subset,
    put_subset,
    scatter_subset,
    subset_places,
    subset_spec,
)

__all__ = [
    "BlockMap",
    "UnitRange",
    "abstract",
    "block_range",
    "block_shape",
    "block_spec",
    "check_on_device",
    "check_per_leaf",
    "empty_shape",
    "gather_subset",
    "global_norm",
    "key_beside",
    "leaf_bits",
    "leaf_blocks",
    "leaf_ids",
    "per_leaf",
    "put_elements",
    "put_subset",
    "shard_bits",
    "shard_block_map",
    "slice_elements",
    "subset_places",
    "subset_spec",
    "zero_padding",
]
