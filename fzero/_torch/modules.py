"""Private torch APIs about modules, and about hooks on their tensors.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "attributes",
    "forward_hooks",
    "gradient_hooks",
    "has_backward_hook",
    "persistent_buffers",
    "refresh_flat_weights",
]

_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def gradient_hooks(x: torch.Tensor) -> list[str]:
    """List the methods by which hooks on a tensor's gradient were registered."""
    hooks_by_method = {
        "register_hook": x._backward_hooks,
        "register_post_accumulate_grad_hook": x._post_accumulate_grad_hooks,  # pyright: ignore[reportAttributeAccessIssue]
    }
    return [name for name, hooks in hooks_by_method.items() if hooks]


def has_backward_hook(module: torch.nn.Module) -> bool:
    """Return whether a full backward hook, or a backward pre-hook, is registered on a module itself."""
    return bool(module._backward_pre_hooks) or (bool(module._backward_hooks) and module._is_full_backward_hook is True)


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return a module's dicts of hooks, by handle: the hooks before and the hooks after its forward pass."""
    return [module._forward_pre_hooks, module._forward_hooks]


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a module itself, without its submodules."""
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return {name: b for name, b in buffers.items() if name not in module._non_persistent_buffers_set}


def attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the attributes that a module sets, without parameters, buffers, submodules and those of every module."""
    return {name: x for name, x in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def refresh_flat_weights(module: torch.nn.Module) -> None:
    """Let recurrent modules see parameters that were None for a while."""
    for m in module.modules():
        if isinstance(m, torch.nn.RNNBase):
            m._init_flat_weights()
