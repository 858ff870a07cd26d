"""Models of transformers whose sequences are split over an axis: checked, and copied."""

import torch

from fzero.nn._copy import copy_module, shared_tensors
from fzero.parallel.context import ContextAxis, check_model, check_tokens, install
from fzero.parallel.experts import use_differentiable

__all__ = ["check_context", "with_context"]


def check_context(module: torch.nn.Module, axis: str) -> ContextAxis:
    """Check that a model's sequences can be split over an axis.

    Raises:
        TypeError: if the axis has no name, or the module is not a model of transformers.
        ValueError: if the model combines tokens otherwise than by attention. The message names the module or the line.
    """
    if not isinstance(axis, str):
        raise TypeError(f'context={axis!r}: expected the name of an axis, such as "cp"')
    context = check_model(module, axis)
    probe = copy_module(module, shared_tensors(module))
    use_differentiable(probe)
    return check_tokens(probe, context)


def with_context(module: torch.nn.Module, axis: str) -> torch.nn.Module:
    """Return a copy of a model of transformers that attends across the ranks of an axis, with the same tensors."""
    context, copy = check_context(module, axis), copy_module(module, shared_tensors(module))
    install(copy, context)
    return copy
