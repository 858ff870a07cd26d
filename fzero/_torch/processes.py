"""Private torch APIs about process groups: functional collectives, groups by name, the store of the world.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from typing import Any

import torch
from torch.distributed import distributed_c10d

__all__ = ["c10d", "default_store", "group_of"]

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""

group_of: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
"""Returns the process group of a name, as collectives are given it."""


def default_store() -> torch.distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store that the processes of the world have in common."""
    return distributed_c10d._get_default_store()
