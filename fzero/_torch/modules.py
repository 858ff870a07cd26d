"""Private torch APIs about modules, and about hooks on their tensors.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["attributes", "forward_hooks", "gradient_hooks", "has_backward_hook", "statistics", "version_of"]

_MODULES_OWN = frozenset(vars(torch.nn.Module()))


def gradient_hooks(x: torch.Tensor) -> list[str]:
    """List the methods by which hooks on the gradient of a tensor were registered."""
    found = {
        "register_hook": x._backward_hooks,
        "register_post_accumulate_grad_hook": x._post_accumulate_grad_hooks,  # pyright: ignore[reportAttributeAccessIssue]
    }
    return [name for name, hooks in found.items() if hooks]


def has_backward_hook(module: torch.nn.Module) -> bool:
    """Return whether a full backward hook, or a backward pre-hook, is registered on a module itself."""
    return bool(module._backward_pre_hooks) or (bool(module._backward_hooks) and module._is_full_backward_hook is True)


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the hooks before and after a module's forward pass, by handle: the dicts themselves."""
    return [module._forward_pre_hooks, module._forward_hooks]


def statistics(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that its state dict holds."""
    own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    return {name: b for name, b in own.items() if name not in module._non_persistent_buffers_set}


def attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return a module's own attributes: no parameters, buffers, submodules, nor those that every module has."""
    return {name: x for name, x in vars(module).items() if name not in _MODULES_OWN}


def version_of(x: torch.Tensor) -> int | None:
    """Return a number that grows when a tensor is written in place; None of inference tensors, which have none."""
    return None if x.is_inference() else x._version
