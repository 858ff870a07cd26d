"""torch.nn modules as pure functions of their parameters and buffers."""

from fzero.init._module import initializer
from fzero.nn._functional import Apply, Functional, functional
from fzero.nn._pipeline import Pipelined, pipeline

__all__ = ["Apply", "Functional", "Pipelined", "functional", "initializer", "pipeline"]
