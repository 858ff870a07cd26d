"""The dtypes in which a unit is gathered, summed over ranks, and handed to the optimizer."""

import torch

from fzero.sharding._spec import Spec

__all__ = ["gathered_dtype", "to_gradient_dtype", "wire_dtype"]


def gathered_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a shard is gathered: its own, or the parameters' dtype under a precision policy."""
    return x.dtype if spec.cast is None else spec.dtype


def wire_dtype(spec: Spec, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is summed over ranks: its own, or a precision policy's."""
    return x.dtype if spec.cast is None else spec.cast.wire


def to_gradient_dtype(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    """Cast a gradient, after its sum over ranks, to the dtype that the optimizer's update receives."""
    return x if spec.cast is None else x.to(spec.cast.grad)
