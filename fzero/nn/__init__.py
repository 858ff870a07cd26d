"""torch.nn modules as pure functions of their parameters and buffers."""

from fzero.init._module import initializer
from fzero.nn._functional import Apply, Functional, functional

__all__ = ["Apply", "Functional", "functional", "initializer"]
