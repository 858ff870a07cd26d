"""torch.nn modules as pure functions of their parameters and buffers."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.layout import is_box
from fzero.world import bound

__all__ = ["Apply", "Functional", "functional"]

Tensors = dict[str, torch.Tensor]


class Functional(NamedTuple):
    """A module taken apart: `apply, params, buffers = functional(module)`.

    Attributes:
        apply: the module as a pure function; see `Apply`.
        params: the trainable parameters by name; a tied parameter has one name.
        buffers: the buffers, and the frozen parameters (`requires_grad=False`), by name.
    """

    apply: "Apply"
    params: Tensors
    buffers: Tensors


def functional(module: torch.nn.Module) -> Functional:
    """Take a module apart into a pure function, its parameters and its buffers.

    The tensors are the module's own, detached: nothing is copied, and `apply` keeps only a copy of the module without
    storage (on the meta device). By the default rule each of the module's repeated blocks is a unit.

    Args:
        module: any module; its hooks, and its training or evaluation mode, are kept as they are now.

    Returns:
        `(apply, params, buffers)`.

    Raises:
        TypeError: if the module, or one inside it, is wrapped by DDP or FSDP, or is compiled, or holds a DTensor:
            they synchronise by themselves, and under torch.func they silently do not.
        ValueError: if a parameter or buffer is uninitialised (lazy modules).

    Example:
        >>> import fzero
        >>> apply, params, buffers = functional(torch.nn.Linear(3, 2))
        >>> [(name, list(p.shape)) for name, p in params.items()]
        [('weight', [2, 3]), ('bias', [2])]
        >>> y, buffers = apply(params, buffers, torch.ones(4, 3))
        >>> y.shape
        torch.Size([4, 2])
    """
    _refuse_wrapped(module)
    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    hollow = _without_storage(module)
    return Functional(Apply(hollow, _mutable(module)), params, {**buffers, **frozen})


@dataclass(frozen=True)
class Apply:
    """A module as a pure function.

    Attributes:
        module: the module without storage.
        mutable: the names of the buffers that its forward pass may write.
    """

    module: torch.nn.Module
    mutable: frozenset[str]

    def __call__(self, params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """Run the module's forward pass.

        Args:
            params: the parameters by name, whole.
            buffers: the buffers and frozen parameters by name.
            *args: what the module's forward takes.
            **kwargs: likewise.

        Returns:
            `(output, buffers)`: the new buffers, such as BatchNorm's running statistics. They are this rank's: make
            them replicated, `fzero.pmean(buffers)`, before a step returns them.

        Raises:
            TypeError: if boxes are passed: gather them first, as `fzero.value_and_grad` does.
        """
        for path, x in zip(*tree.flatten_with_paths((params, buffers), is_box)[:2], strict=True):
            if is_box(x):
                raise TypeError(
                    f"{type(self.module).__name__} was given {x!r} for {path.split('.', 1)[1]!r}, which is a "
                    "box and not a tensor: call it inside fzero.value_and_grad, or on fzero.gather(params)"
                )
        state = {**params, **buffers, **{name: _own_copy(buffers[name]) for name in sorted(self.mutable)}}
        out = torch.func.functional_call(self.module, state, args, kwargs)
        return out, {name: state[name] if name in self.mutable else x for name, x in buffers.items()}


def _own_copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a buffer for this rank to write; a simulation needs one that differs by rank."""
    copied = x.clone()
    for axis in bound():
        if not axis.group:
            copied = torch.where(axis.token >= 0, copied, copied)
    return copied


def _mutable(module: torch.nn.Module) -> frozenset[str]:
    """Name the buffers that a forward pass may write: a training module's persistent statistics and counters."""
    names = set()
    for prefix, m in module.named_modules():
        for name, b in m.named_buffers(recurse=False):
            if m.training and name not in m._non_persistent_buffers_set and (b.is_floating_point() or b.numel() == 1):
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names & dict(module.named_buffers()).keys())


def _without_storage(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with meta tensors for its parameters and buffers; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)


def _refuse_wrapped(module: torch.nn.Module) -> None:
    for name, m in module.named_modules():
        kinds = {cls.__name__ for cls in type(m).__mro__}
        wrapper = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
        if wrapper:
            raise TypeError(
                f"module {name!r} is wrapped by {wrapper.pop()}, whose own synchronisation does not work under "
                "torch.func; pass the plain module: fzero.shard does the sharding"
            )
        if "OptimizedModule" in kinds:
            raise TypeError(f"module {name!r} is compiled; pass the plain module and compile the sharded step")
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"{name!r} is not initialised; run the lazy module once on a batch first")
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            raise TypeError(f"{name!r} is a DTensor; pass a plain module: fzero.shard does the sharding")
