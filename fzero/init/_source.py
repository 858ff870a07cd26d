"""Where a tree's leaves come from: a tree, a function that makes one, or a module."""

import random
from collections.abc import Callable
from typing import Any

import torch

from fzero._notice import notice
from fzero.init._deferred import Deferred, defer
from fzero.init._given import LeafSupply, given
from fzero.init._module import initializer, on_meta, trainable

__all__ = ["source_of"]


def source_of(what: str, values: Any, one_by_one: bool, by: str = "") -> LeafSupply | Deferred:
    """Return the leaves of a tree, to be had one after the other.

    Args:
        what: what the tree is called in messages.
        values: the tree; or a function without arguments that makes it, or a module, which has its trainable parameters
            or, on the meta device, makes them.
        one_by_one: whether each leaf that a function makes is made only when it is its turn, if the function can be
            traced. Else the function is called now, and each leaf is freed when it had its turn.
        by: the call by which the caller gives the leaves up, if they do.

    Raises:
        ValueError: if a module is partly on the meta device, or the tree is cut. Names the parameter or the leaf.
        TypeError: if a leaf is no dense tensor. The message names it.
    """
    if isinstance(values, torch.nn.Module):
        values = initializer(values) if on_meta(values) else trainable(values)
    if not callable(values):
        return given(what, values, by)
    deferred = _deferred(values) if one_by_one else None
    return given(what, values(), by) if deferred is None else deferred


def _deferred(init: Callable[[], Any]) -> Deferred | None:
    """Trace an init function; return None, and say why, if that is not possible."""
    before = random.getstate(), torch.get_rng_state()
    try:
        return defer(init)
    except Exception as error:  # if it is init's own, it comes again when init is called
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        name, reason = getattr(init, "__name__", "the init function"), " ".join(str(error).split())[:120]
        notice(
            f"fzero: {name} cannot be traced ({type(error).__name__}: {reason}), so every rank holds the whole tree "
            "while it is cut"
        )
        return None
