"""torch.nn modules as pure functions of their parameters and buffers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero.axes.lockstep import in_lockstep
from fzero.axes.scope import bound, data_axes
from fzero.init._module import initializer, without_storage
from fzero.layout.boxes import is_box
from fzero.nn._blocks import boxes_to_blocks, rematerialise

__all__ = ["Apply", "Functional", "functional", "initializer"]

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


def functional(module: torch.nn.Module, remat: bool | str | Callable[[Any], bool] = False) -> Functional:
    """Take a module apart into a pure function, its parameters and its buffers.

    The tensors are the module's own, detached: nothing is copied, and `apply` keeps only a copy of the module without
    storage (on the meta device). By the default rule each of the module's repeated blocks is a unit.

    Args:
        module: any module; its hooks, and its training or evaluation mode, are kept as they are now.
        remat: whether each repeated block (a numbered child, `"h.0"`, as in the default rule of units) keeps only its
            inputs, and runs again in the backward pass; "matmuls" or a function of an operation says what it keeps
            besides (see `fzero.remat`). Then `apply` takes boxes too: within `value_and_grad(loss_fn, gather=False)` a
            block's parameters are gathered for it alone, in either pass. A language model runs with `use_cache=False`.

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
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, given a {type(module).__name__}")
    _refuse_wrapped(module)
    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    constants = {**buffers, **frozen}
    copied, mutable = without_storage(module), _mutable(module)
    blocks = rematerialise(copied, None if remat is True else remat, mutable) if remat else ()
    apply = Apply(copied, frozenset(params), frozenset(constants), mutable, blocks)
    return Functional(apply, params, constants)


@dataclass(frozen=True)
class Apply:
    """A module as a pure function.

    Attributes:
        module: the module without storage.
        params: the names of its trainable parameters.
        buffers: the names of its buffers and frozen parameters.
        mutable: the names of the buffers that its forward pass may write in place.
        blocks: the names of the submodules that run again in the backward pass.
    """

    module: torch.nn.Module
    params: frozenset[str]
    buffers: frozenset[str]
    mutable: frozenset[str]
    blocks: tuple[str, ...] = ()
    _copies: dict[tuple[int, ...], torch.nn.Module] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """Run the module's forward pass.

        Args:
            params: the parameters by name, whole; with `remat` they may be boxes.
            buffers: the buffers and frozen parameters by name; with `remat` the latter may be boxes.
            *args: what the module's forward takes.
            **kwargs: likewise.

        Returns:
            `(output, buffers)`: the new buffers, such as BatchNorm's running statistics. They are this rank's: make
            them replicated, `fzero.pmean(buffers)`, before a step returns them.

        Raises:
            TypeError: if boxes are passed: gather them first, as `fzero.value_and_grad` does.
            ValueError: if names are missing or unknown.
            RuntimeError: if the forward pass wrote a buffer in place that is not in `mutable`.
        """
        self._check(params, self.params, "params")
        self._check(buffers, self.buffers, "buffers")
        state = {**params, **buffers, **{name: _own_copy(buffers[name]) for name in sorted(self.mutable)}}
        plain = {name: x for name, x in buffers.items() if not is_box(x)}
        versions = {} if torch.compiler.is_compiling() else {name: x._version for name, x in plain.items()}
        module = self._own_module()
        with boxes_to_blocks(module, self.blocks, state) as state:
            out = torch.func.functional_call(module, state, args, kwargs)
        for name, version in versions.items():
            if name not in self.mutable and buffers[name]._version != version:
                raise RuntimeError(
                    f"the module's forward pass wrote buffer {name!r} in place, which was taken for a constant: it is "
                    "not a persistent floating-point buffer, or a counter, of a module in training mode"
                )
        return out, {**buffers, **{name: state[name] for name in plain}}

    def _own_module(self) -> torch.nn.Module:
        """Return the module to run: in lockstep the rank's own, since functional_call writes into it while it runs."""
        if not in_lockstep():
            return self.module
        rank = tuple([axis.rank for axis in bound()])
        if rank not in self._copies:
            self._copies[rank] = copy.deepcopy(self.module)
        return self._copies[rank]

    def _check(self, given: Any, names: frozenset[str], what: str) -> None:
        if not isinstance(given, dict):
            raise TypeError(f"{what} is {given!r}: expected a dict of tensors, as fzero.nn.functional returned it")
        for name, x in given.items():
            if is_box(x) and not self.blocks:
                raise TypeError(
                    f"{type(self.module).__name__} was given {x!r} for {name!r}, which is a box and not a tensor: "
                    "call it inside fzero.value_and_grad, or on fzero.gather(params)"
                )
        if given.keys() != names:
            missing, extra = sorted(names - given.keys()), sorted(given.keys() - names)
            raise ValueError(f"{what} do not match the module: missing {missing}, not the module's {extra}")


def _own_copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a buffer for this rank to write; a simulation needs one that differs by rank."""
    copied = x.clone()
    for axis in data_axes() if x.is_floating_point() else ():  # a counter is equal on all ranks
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


def _refuse_wrapped(module: torch.nn.Module) -> None:
    for name, m in module.named_modules():
        kinds = {cls.__name__ for cls in type(m).__mro__}
        wrapper = kinds & {
            "DistributedDataParallel",
            "FullyShardedDataParallel",
            "FSDPModule",
            "DataParallel",
            "SyncBatchNorm",
        }
        if wrapper:
            raise TypeError(
                f"module {name!r} is {wrapper.pop()}, whose own synchronisation does not work under "
                "torch.func; pass the plain module: fzero.shard does the sharding"
            )
        if "OptimizedModule" in kinds:
            raise TypeError(f"module {name!r} is compiled; pass the plain module and compile the sharded step")
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"{name!r} is not initialised; run the lazy module once on a batch first")
        if type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor":
            raise TypeError(f"{name!r} is a DTensor; pass a plain module: fzero.shard does the sharding")
