"""What the functions here ask of their arguments."""

from typing import Any

import torch

__all__ = ["check_floating", "given"]


def given(x: Any) -> str:
    """Say what an argument is: a tensor's dtype and shape, else the value."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)


def check_floating(name: str, x: Any, expected: str) -> None:
    """Check that an argument is a floating-point tensor.

    Raises:
        TypeError: if it is not. Names it, and says which shape was expected.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} is {given(x)}: expected a floating-point tensor {expected}")
