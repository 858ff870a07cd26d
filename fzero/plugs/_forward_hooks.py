"""Forward hooks of a compiled step: those that the model had when it was compiled, whatever a loop adds later."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero._torch.modules import forward_hooks

__all__ = ["check_hooks", "list_hooks"]

_Hooks = Sequence[tuple[str, Callable[..., Any]]]
"""Each hook with the path of its module."""


def list_hooks(model: torch.nn.Module) -> _Hooks:
    """List the hooks before and after the forward pass of a model and its submodules."""
    return [(path, f) for path, m in model.named_modules() for hooks in forward_hooks(m) for f in hooks.values()]


def check_hooks(compiled_hooks: _Hooks, model: torch.nn.Module) -> None:
    """Check that a model has the hooks that its compiled step runs.

    Raises:
        ValueError: if one was added or removed since. The message names it and its module.
    """
    hooks = list_hooks(model)
    if hooks == compiled_hooks:
        return
    added = [x for x in hooks if x not in compiled_hooks]
    path, hook = (added or [x for x in compiled_hooks if x not in hooks] or hooks)[0]
    raise ValueError(
        f"forward hook {getattr(hook, '__name__', hook)!r} on {path or type(model).__name__!r} was "
        f"{'added' if added else 'removed'} after the model was sharded, and a compiled step would not see it: pass "
        "backend=None to run steps eagerly, or register hooks before. neftune_noise_alpha of transformers adds one "
        "when training starts"
    )
