"""The source of a tree's leaves: a tree, a function that returns one, or a module."""

from typing import Any

import torch

from fzero.zero._leaf_supply import make_supply
from fzero.zero._module_params import initializer, is_on_meta, trainable_params
from fzero.zero._traced_init import try_trace
from fzero.zero._tree_source import TreeSource

__all__ = ["make_source"]


def make_source(label: str, values: Any, lazy: bool, donated_to: str | None = None) -> TreeSource:
    """Return the source of a tree's leaves, which supplies them one after the other.

    Args:
        label: the tree's name in messages.
        values: the tree; or a function without arguments that returns it; or a module. The tree of a module has its
            trainable parameters; a module on the meta device initializes them.
        lazy: whether to trace a function, so that each leaf is computed only when it is needed. Otherwise, or if it
            cannot be traced, the function is called now, and each leaf is freed after its use.
        donated_to: the call that the leaves are donated to, for messages; None if the caller keeps them.

    Raises:
        ValueError: if a module is partly on the meta device, or the tree is sharded. The message names the parameter
            or the leaf.
        TypeError: if a leaf is no dense tensor. The message names it. Also if a function returns a module.
    """
    if isinstance(values, torch.nn.Module):
        values = initializer(values) if is_on_meta(values) else trainable_params(values)
    if not callable(values):
        return make_supply(label, values, donated_to)
    source = try_trace(values) if lazy else None
    if source is None:
        return make_supply(label, _check_no_module(values()), donated_to)
    _check_no_module(source.values)
    return source


def _check_no_module(values: Any) -> Any:
    """Check that a function returned no module, and return its result."""
    if isinstance(values, torch.nn.Module):
        raise TypeError(
            f"the function returned a module, {type(values).__name__}: pass the module itself, step.init(module, opt), "
            'built within torch.device("meta") if it does not fit'
        )
    return values
