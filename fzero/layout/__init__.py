"""How a tree is cut: specs, the boxes of the pieces, units, and flat shards."""
