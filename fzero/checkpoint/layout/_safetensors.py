"""safetensors' format, in which each rank writes its file: the names of dtypes, and the header."""

import json
from typing import Any

import torch

from fzero.checkpoint.layout._ranges import ALIGNMENT, TreeLayout

__all__ = ["DTYPES_BY_NAME", "FORMAT", "SAFETENSORS_NAMES", "data_name", "safetensors_header"]


FORMAT = "fzero checkpoint"

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",  # safetensors has no such dtype: files hold pairs of F64
}
DTYPES_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def data_name(nonce: str, rank: int, ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"{nonce}-{rank:05d}-of-{ranks:05d}.safetensors"


def safetensors_header(layout: TreeLayout, rank: int) -> bytes:
    """Return the header of a rank's file, in safetensors' format, so that any safetensors reader reads the ranges."""
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    offset = 0
    for piece in layout.owned_pieces(rank):
        leaf = layout.leaves[piece.leaf]
        end = offset + piece.numel * leaf.dtype.itemsize
        pairs = leaf.dtype == torch.complex128
        name, numel = ("F64", 2 * piece.numel) if pairs else (SAFETENSORS_NAMES[leaf.dtype], piece.numel)
        entries[leaf.path] = {"dtype": name, "shape": [numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
