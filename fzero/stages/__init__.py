"""ZeRO: each stage is a row of the table of layouts, and `shard` composes the transforms by it."""
