"""The workspace that torch gives to cuBLAS, which no graph shows."""

import os
import re

import torch

__all__ = ["matrix_workspace_bytes"]

# The defaults of torch's aten/src/ATen/cuda/CublasHandlePool.cpp, in torch 2.11 to 2.15.
_HOPPER_BYTES = 32 << 20  # from compute capability 9.0 on
_OLDER_BYTES = 2 * (4096 << 10) + 8 * (16 << 10)


def matrix_workspace_bytes(kind: str) -> int:
    """Return the bytes that the first matrix product takes on a device of a kind, and keeps for all later ones.

    Each thread that calls cuBLAS takes as much, once for each stream. A user may set it by CUBLAS_WORKSPACE_CONFIG. If
    this machine has no GPU, the GPU is assumed to be of Hopper's generation or newer.

    Args:
        kind: torch's name of the device type; 0 bytes for others than "cuda".
    """
    if kind != "cuda":
        return 0
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum([(int(kilobytes) << 10) * int(count) for kilobytes, count in pairs])
    is_older = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    return _OLDER_BYTES if is_older else _HOPPER_BYTES
