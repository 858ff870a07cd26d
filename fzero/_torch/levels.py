"""Private torch APIs about the levels of torch.func: which transforms run, and which tensors they track.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Written",
    "derivatives",
    "differentiates_now",
    "is_differentiated",
    "is_foreign",
    "is_mapped_now",
    "is_wrapped",
    "maps_now",
    "may_differ",
    "unwrapped",
    "vmaps",
    "written",
]


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether a transform of torch.func tracks a tensor."""
    return functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) > 0


def is_mapped_now(x: torch.Tensor) -> bool:
    """Return whether a tensor is batched by the innermost transform that runs now, a vmap."""
    return functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_current_level()


def may_differ(x: torch.Tensor, token: torch.Tensor) -> bool:
    """Return False for a tensor that the vmap that maps over a token does not map over: it is one for all samples."""
    if not functorch.is_batchedtensor(token):
        return True
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == functorch.maybe_get_level(token):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_differentiated(x: torch.Tensor) -> bool:
    """Return whether a tensor requires grad, by itself or in a transform that tracks it."""
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return x.requires_grad


def derivatives(xs: Sequence[torch.Tensor]) -> int | None:
    """Count the gradients that are being taken of tensors, one around the other; None if other transforms run."""
    if any(i.key() != functorch.TransformType.Grad for i in functorch.get_interpreter_stack() or ()):
        return None
    found = 0
    for x in xs:
        count = int(x.requires_grad)
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
            count += x.requires_grad
        found = max(found, count)
    return found


def differentiates_now() -> bool:
    """Return whether a gradient or a forward-mode derivative is being taken by a transform around this code."""
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(i.key() in kinds for i in functorch.get_interpreter_stack() or ())


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies below all transforms of torch.func: ranks stacked, gradients not tracked."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


class Written(NamedTuple):
    """A count that rises whenever a tensor is written in place, and the memory that it stands for.

    The weak reference frees the memory, but not its address: no later storage is taken for this one.
    """

    version: int
    storage: StorageWeakRef


def written(x: torch.Tensor) -> Written:
    """Return what an in-place write into a tensor changes, under any transform.

    Torch counts no writes through `x.data`, and none into what was made in inference mode.
    """
    x = unwrapped(x)  # only what lies below counts
    return Written(0 if x.is_inference() else x._version, StorageWeakRef(x.untyped_storage()))


def is_foreign(x: torch.Tensor) -> bool:
    """Return whether a transform tracks a tensor that does not run now, so that it was captured from outside."""
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    level, stack = functorch.maybe_get_level(x), functorch.get_interpreter_stack() or []
    if level < 1:  # its transform has ended
        return False
    kind = next((i.key() for i in stack if i.level() == level), None)
    return kind is None or (kind == functorch.TransformType.Vmap) != functorch.is_batchedtensor(x)


def maps_now(token: torch.Tensor) -> bool:
    """Return, inside a Function's vmap rule, whether that vmap is the one that maps over a token."""
    return functorch.maybe_get_level(token) == (functorch.maybe_current_level() or 0) + 1


def vmaps() -> list[str]:
    """List the randomness of each vmap that code runs under: Same, Different or Error."""
    kinds = [c for c in functorch.get_interpreter_stack() or () if c.key() == functorch.TransformType.Vmap]
    return [functorch.CVmapInterpreterPtr(c).randomness().name for c in kinds]
