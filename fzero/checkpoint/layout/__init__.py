"""The layout of a checkpoint: which elements of a tree each rank writes and reads, and the manifest that stores it."""

from fzero.checkpoint.layout._bounded_json import parse_json
from fzero.checkpoint.layout._chunks import ChunkRange, full_chunk, rectangles, runs
from fzero.checkpoint.layout._json_values import is_empty, is_none, possible_paths, values_like
from fzero.checkpoint.layout._local_tree import LocalPiece, LocalTree, PlainMemory, is_entry, local_tree
from fzero.checkpoint.layout._manifest import MANIFEST, PAGE_BYTES, File, Manifest, layout_text, xxh3_checksum
from fzero.checkpoint.layout._parse_manifest import parse_manifest, read_manifest
from fzero.checkpoint.layout._ranges import Leaf, TreeLayout
from fzero.checkpoint.layout._safetensors import DTYPES_BY_NAME, SAFETENSORS_NAMES, data_name, safetensors_header
from fzero.checkpoint.layout._unit_parts import LeafSource

__all__ = [
    "DTYPES_BY_NAME",
    "MANIFEST",
    "PAGE_BYTES",
    "SAFETENSORS_NAMES",
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
    "is_empty",
    "is_entry",
    "is_none",
    "layout_text",
    "local_tree",
    "parse_json",
    "parse_manifest",
    "possible_paths",
    "read_manifest",
    "rectangles",
    "runs",
    "safetensors_header",
    "values_like",
    "xxh3_checksum",
]
