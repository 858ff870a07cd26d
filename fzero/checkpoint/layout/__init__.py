"""The layout of a checkpoint: which elements of a tree each rank writes and reads, and the manifest that stores it."""

from fzero.checkpoint.layout._bounded_json import parse_json
from fzero.checkpoint.layout._chunks import ChunkRange, full_chunk, rectangles, runs
from fzero.checkpoint.layout._json_values import is_empty, is_none, possible_paths, values_like
from fzero.checkpoint.layout._local_tree import LocalPiece, LocalTree, PlainMemory, is_entry, local_tree
from fzero.checkpoint.layout._manifest import (
    DTYPES,
    MANIFEST,
    NAMES,
    PAGE_BYTES,
    File,
    Manifest,
    data_name,
    header,
    layout_text,
    parse,
    read_manifest,
    xxh3_checksum,
)
from fzero.checkpoint.layout._ranges import Leaf, TreeLayout
from fzero.checkpoint.layout._unit_parts import LeafSource

__all__ = [
    "DTYPES",
    "MANIFEST",
    "NAMES",
    "PAGE_BYTES",
    "ChunkRange",
    "File",
    "Leaf",
    "LeafSource",
    "LocalPiece",
    "LocalTree",
    "Manifest",
    "PlainMemory",
    "TreeLayout",
    "data_name",
    "full_chunk",
    "header",
    "is_empty",
    "is_entry",
    "is_none",
    "layout_text",
    "local_tree",
    "parse",
    "parse_json",
    "possible_paths",
    "read_manifest",
    "rectangles",
    "runs",
    "values_like",
    "xxh3_checksum",
]
