"""The source of a tree's leaves: a tree, a function that returns one, or a module."""

from typing import Any

import torch

from fzero.zero._leaf_supply import LeafSupply, make_supply
from fzero.zero._module_params import initializer, is_on_meta, trainable_params
from fzero.zero._traced_init import TracedInit, try_trace

__all__ = ["make_source"]


def make_source(label: str, values: Any, lazy: bool, call: str = "") -> LeafSupply | TracedInit:
    """Return the source of a tree's leaves, which supplies them one after the other.

    Args:
        label: the tree's name in messages.
        values: the tree; or a function without arguments that returns it; or a module. The tree of a module has its
            trainable parameters; a module on the meta device initializes them.
        lazy: whether to trace a function, so that each leaf is computed only when it is needed. Otherwise, or if it
            cannot be traced, the function is called now, and each leaf is freed after its use.
        call: if the caller donates the leaves, the call that does, for messages.

    Raises:
        ValueError: if a module is partly on the meta device, or the tree is sharded. The message names the parameter
            or the leaf.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    if isinstance(values, torch.nn.Module):
        values = initializer(values) if is_on_meta(values) else trainable_params(values)
    if not callable(values):
        return make_supply(label, values, call)
    source = try_trace(values) if lazy else None
    return make_supply(label, values(), call) if source is None else source
