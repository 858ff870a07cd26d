"""A module split at its repeated blocks into pure functions."""

from fzero.nn.split._split_module import split_module

__all__ = ["split_module"]
