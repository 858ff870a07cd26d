"""Codecs: a tensor in fewer bits, block by block, for what collectives send."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.codecs._codec import (
    CODECS,
    Codec,
    CodecKey,
    EncodedTensor,
    decode_blocks,
    encode_blocks,
    float8,
    int4,
    int8,
    round_trip,
    round_with,
    scale_blocks,
)
from fzero.codecs._quantize import KINDS, CodeKind, block_scales, codes_to_float32, largest_magnitudes, pack, unpack

__all__ = ["Codec", "EncodedTensor", "float8", "int4", "int8"]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "CODECS",
    "KINDS",
    "CodeKind",
    "CodecKey",
    "block_scales",
    "codes_to_float32",
    "decode_blocks",
    "encode_blocks",
    "largest_magnitudes",
    "pack",
    "round_trip",
    "round_with",
    "scale_blocks",
    "unpack",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
