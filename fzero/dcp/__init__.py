"""A door to torch.distributed.checkpoint (DCP): FSDP2 programs read what is written here, and the reverse.

DCP knows n-d chunks of named tensors. What a rank holds of a leaf is a flat range, which is at most 2 d - 1 of these.
"""

from fzero.dcp._doors import load, save

__all__ = ["load", "save"]
