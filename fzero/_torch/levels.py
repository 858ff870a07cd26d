"""Private torch APIs about the levels of torch.func: the running transforms, and the tensors that they track.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "VersionKey",
    "derivatives",
    "differentiates_now",
    "in_forward_mode",
    "is_current_vmap",
    "is_differentiated",
    "is_foreign",
    "is_mapped",
    "is_wrapped",
    "may_differ",
    "unwrap",
    "version_key",
    "vmaps",
]


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether a transform of torch.func tracks a tensor."""
    return functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) > 0


def is_mapped(x: torch.Tensor) -> bool:
    """Return whether the innermost running transform is a vmap that maps over a tensor."""
    return functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_current_level()


def may_differ(x: torch.Tensor, token: torch.Tensor) -> bool:
    """Return whether a tensor may differ between the samples of the vmap that maps over a token.

    It returns False if this vmap does not map over the tensor, and True if no vmap maps over the token.
    """
    if not functorch.is_batchedtensor(token):
        return True
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_get_level(token):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_differentiated(x: torch.Tensor) -> bool:
    """Return whether a tensor requires grad, itself or at the level of a transform that tracks it."""
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return x.requires_grad


def derivatives(xs: Sequence[torch.Tensor]) -> int | None:
    """Return the largest number of nested gradients that are being taken of a tensor; None if other transforms run."""
    if any(i.key() != functorch.TransformType.Grad for i in functorch.get_interpreter_stack() or ()):
        return None
    largest = 0
    for x in xs:
        count = int(x.requires_grad)
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
            count += x.requires_grad
        largest = max(largest, count)
    return largest


def differentiates_now() -> bool:
    """Return whether a transform around this code takes a gradient or a forward-mode derivative."""
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(i.key() in kinds for i in functorch.get_interpreter_stack() or ())


def in_forward_mode() -> bool:
    """Return whether a transform around this code takes a forward-mode derivative."""
    return any(i.key() == functorch.TransformType.Jvp for i in functorch.get_interpreter_stack() or ())


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor below all transforms of torch.func, with ranks stacked and gradients untracked."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


class VersionKey(NamedTuple):
    """The version of a tensor, which rises with each in-place write, and a weak reference to its storage.

    The weak reference lets torch free the memory, but reserves the address. So no later storage equals this one.
    """

    version: int
    storage: StorageWeakRef


def version_key(x: torch.Tensor) -> VersionKey:
    """Return a value that every in-place write into a tensor changes, under any transform.

    Torch does not count writes through `x.data`, nor writes into inference tensors.
    """
    x = unwrap(x)  # torch counts writes only in the tensor below all transforms
    return VersionKey(0 if x.is_inference() else x._version, StorageWeakRef(x.untyped_storage()))


def is_foreign(x: torch.Tensor) -> bool:
    """Return whether a tensor was captured from outside: the transform that tracks it is not running now."""
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    level, stack = functorch.maybe_get_level(x), functorch.get_interpreter_stack() or []
    if level < 1:  # its transform has ended
        return False
    kind = next((i.key() for i in stack if i.level() == level), None)
    return kind is None or (kind == functorch.TransformType.Vmap) != functorch.is_batchedtensor(x)


def is_current_vmap(token: torch.Tensor) -> bool:
    """Return whether the vmap whose rule of a Function is running maps over a token."""
    return functorch.maybe_get_level(token) == (functorch.maybe_current_level() or 0) + 1


def vmaps() -> list[str]:
    """List the randomness of each running vmap: Same, Different or Error."""
    kinds = [c for c in functorch.get_interpreter_stack() or () if c.key() == functorch.TransformType.Vmap]
    return [functorch.CVmapInterpreterPtr(c).randomness().name for c in kinds]
