"""Half precision in another library's loop: the policy of a setting, and batches in its dtype."""

from typing import Any

import torch

from fzero import optim

__all__ = ["cast", "half_precision"]


def half_precision(module: torch.nn.Module, dtype: torch.dtype | None) -> optim.Precision | None:
    """Return the policy of mixed precision in a dtype; None for parameters that are in half precision already.

    Where parameters are sharded between steps, the shards are the master weights, as FSDP2's are.
    """
    floats = {p.dtype for p in module.parameters() if p.requires_grad}
    return None if dtype is None or floats != {torch.float32} else optim.Precision(param=dtype, shard=torch.float32)


def cast(x: Any, precision: optim.Precision | None) -> Any:
    """Bring a leaf of a batch to the dtype of the parameters, if it is a floating-point tensor."""
    if precision is None or not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.to(precision.param)
