"""Private torch APIs about process groups: functional collectives, groups by name, the store of the world.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

from typing import Any

import torch
from torch.distributed import distributed_c10d

__all__ = ["c10d", "default_store", "rank_group"]


c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""

rank_group: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
"""Returns the process group with a name; functional collectives take such names."""


def default_store() -> torch.distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store that all processes of the world share."""
    return distributed_c10d._get_default_store()
