"""Apply: a module as a pure function of its parameters and buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_callable
from fzero._torch import is_tracing
from fzero._torch.levels import is_differentiated
from fzero._torch.types import NamedTensors
from fzero._tracebacks import api_boundary_with
from fzero.axes import bound_axes, in_lockstep, loss_axes
from fzero.nn._copy import copy_module, shared_tensors
from fzero.nn._module_checks import check_one_device, check_order, check_tensors, explain_old_function
from fzero.nn._module_writes import (
    LeftoverCheck,
    check_leftovers,
    check_writes,
    module_states,
    record_contents,
    record_versions,
    restore_modules,
)
from fzero.nn._remat_blocks import give_boxes_to_blocks
from fzero.parallel.context import notice_split_tokens
from fzero.parallel.tensor import Layers
from fzero.sharding import is_box

__all__ = ["Apply"]

_CALL = (
    "The call is apply(params, buffers, x), with all three results of apply, params, buffers = nn.functional(module)"
)


class _ApplyCache:
    """Results that the calls of an `Apply` keep for later calls.

    Attributes:
        copies: in lockstep, each rank's copy of the module, by the rank's coordinates on the mesh.
        structures: the calls that were checked for leftovers: function, structure of the arguments, and whether
            the parameters are differentiated.
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[int, ...], torch.nn.Module] = {}
        self.structures: set[Any] = set()


@dataclass(frozen=True)
class Apply:
    """A module as a pure function.

    Attributes:
        module: the module without storage.
        param_names: the names of its trainable parameters.
        buffer_names: the names of its buffers and frozen parameters.
        mutable_names: the names of the buffers that its forward pass may write in place.
        scratch_names: the names of the buffers that its forward pass writes before it reads them; a call returns them
            as they were.
        blocks: the names of the submodules that run again in the backward pass.
        tp: the layers that are split over an axis. The ranks along that axis receive the same arguments.
        ignore_writes: patterns of the attributes that forward may write although the writes are lost.
        prefix: the module's name in a larger module, with a dot; it begins the paths of attributes.
        is_own: whether `module` is the caller's, which gets the values that a call leaves in attributes.
    """

    module: torch.nn.Module
    param_names: frozenset[str]
    buffer_names: frozenset[str]
    mutable_names: frozenset[str]
    blocks: tuple[str, ...] = ()
    tp: Layers | None = None
    ignore_writes: tuple[str, ...] = ()
    prefix: str = ""
    is_own: bool = False
    scratch_names: frozenset[str] = frozenset()
    _cache: _ApplyCache = field(default_factory=_ApplyCache, repr=False, compare=False)

    @api_boundary_with(_CALL)
    def __call__(
        self, params: NamedTensors, buffers: NamedTensors, *args: Any, **kwargs: Any
    ) -> tuple[Any, NamedTensors]:
        """Run the module's forward pass.

        The first call looks for attributes in which forward left a value, since that value is lost. A number that it
        changed, and a tensor that does not depend on parameters, get a notice.

        Args:
            params: the full parameters by name; with `remat` they may be boxes.
            buffers: the buffers and frozen parameters by name; with `remat` the frozen parameters may be boxes.
            *args: the positional arguments of the module's forward.
            **kwargs: its keyword arguments.

        Returns:
            `(output, buffers)`. The new buffers, such as BatchNorm's running statistics, are this rank's. Make them
            replicated with `fzero.collectives.pmean(buffers)` before a step returns them.

        Raises:
            TypeError: if `params` or `buffers` is not a dict of tensors. Gather boxes first, as
                `fzero.value_and_grad` does.
            ValueError: if names are missing or unknown, or a buffer lies on another device than the parameters. If
                layers are split over an axis, also if the arguments of forward are known to differ by rank along it.
            RuntimeError: if the forward pass wrote a parameter, or wrote in place a buffer that is not in
                `mutable_names`. Also if it applies an `autograd.Function` that `torch.func` cannot differentiate. Also
                if it left a tensor that depends on parameters in an attribute, or in a trace changed a number, string
                or flag there.
        """
        return self._call(None, params, buffers, args, kwargs)

    def method(self, f: Callable[..., Any]) -> Callable[..., tuple[Any, NamedTensors]]:
        """Return a pure function that runs `f(module, *args)` where a call of `apply` runs the module's forward pass.

        So a program that uses a module as an object (a loss that calls it twice, or reads a submodule) becomes pure.
        Flax's `apply(..., method=f)` is the same.

        Args:
            f: the program. Its first argument is the module, whose tensors are those of the call.

        Returns:
            A function of `(params, buffers, *args, **kwargs)` that returns `(f's result, buffers)`, and raises what a
            call of `apply` raises.

        Example:
            >>> import fzero
            >>> apply, params, buffers = fzero.nn.functional(torch.nn.Linear(3, 2))
            >>> decay = apply.method(lambda module: module.weight.square().sum())
            >>> decay(params, buffers)[0].shape
            torch.Size([])
        """
        check_callable("f", f, "a function of the module and further arguments")

        @api_boundary_with(_CALL)
        def run(params: NamedTensors, buffers: NamedTensors, *args: Any, **kwargs: Any) -> tuple[Any, NamedTensors]:
            return self._call(f, params, buffers, args, kwargs)

        return run

    def _call(
        self, f: Callable[..., Any] | None, params: NamedTensors, buffers: NamedTensors, args: Any, kwargs: Any
    ) -> tuple[Any, NamedTensors]:
        """Run `f` on the module, or by default its forward pass, with these tensors."""
        check_order(params, buffers, self.param_names, self.buffer_names)
        check_tensors(params, self.param_names, "params", type(self.module).__name__, boxes=bool(self.blocks))
        check_tensors(buffers, self.buffer_names, "buffers", type(self.module).__name__, boxes=bool(self.blocks))
        check_one_device(params, buffers, type(self.module).__name__)
        if self.tp is not None:
            self.tp.check_shared({**{str(i): x for i, x in enumerate(args)}, **kwargs})
        notice_split_tokens(self.module)
        copies = {name: _own_copy(buffers[name]) for name in sorted(self.mutable_names | self.scratch_names)}
        with give_boxes_to_blocks(self._own_module(), self.blocks, {**params, **buffers, **copies}) as state:
            out = self._run_and_check_writes(f, state, args, kwargs)
        unwritten_names = {name for name, x in buffers.items() if is_box(x)} | self.scratch_names
        return out, {name: x if name in unwritten_names else state[name] for name, x in buffers.items()}

    def _run_and_check_writes(self, f: Callable[..., Any] | None, state: NamedTensors, args: Any, kwargs: Any) -> Any:
        """Run `f` on `state`, where writes replace mutable buffers, and check its other writes."""
        module = self._own_module()
        if torch.compiler.is_dynamo_compiling():  # Dynamo refuses side effects itself
            return _call_on(module, f, state, args, kwargs)
        # Calls with equal structures leave the same values behind. A function's code stands for it: the function may
        # be made anew at each call, and hold tensors.
        is_traced, has_gradient = is_tracing(), any(map(is_differentiated, state.values()))
        structure = getattr(f, "__code__", f), tree.flatten((args, kwargs))[1], has_gradient
        is_new = not self.is_own and (is_traced or structure not in self._cache.structures)
        versions, contents_before = record_versions(state), record_contents(module) if is_new else None
        stand_ins = module_states(module)
        try:
            out = _call_on(module, f, state, args, kwargs)
            check_writes(versions, state, self.param_names, self.mutable_names | self.scratch_names)
            if contents_before is not None:
                kind = type(module).__name__
                check = LeftoverCheck(kind, self.prefix, self.ignore_writes, is_traced, has_program=f is not None)
                check_leftovers(contents_before, module, check)
                self._cache.structures.add(structure)
        except RuntimeError as error:
            explain_old_function(error, type(module).__name__)
            raise
        finally:
            restore_modules(stand_ins, traced=is_traced)
        return out

    def _own_module(self) -> torch.nn.Module:
        """Return the module to run: each of several ranks in lockstep has a copy, for a call writes into it."""
        if not in_lockstep() or all(axis.size == 1 for axis in bound_axes()):
            return self.module
        rank, copies = tuple([axis.rank for axis in bound_axes()]), self._cache.copies
        if rank not in copies:
            copies[rank] = copy_module(self.module, shared_tensors(self.module))
        return copies[rank]


class _Method(torch.nn.Module):
    """A module whose forward pass runs a function on another module."""

    def __init__(self, module: torch.nn.Module, f: Callable[..., Any]) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(self.module, *args, **kwargs)


def _call_on(module: torch.nn.Module, f: Callable[..., Any] | None, state: NamedTensors, args: Any, kwargs: Any) -> Any:
    """Run `f` on a module, or by default its forward pass, with other tensors. New buffers replace those of `state`."""
    if f is None:
        return torch.func.functional_call(module, state, args, kwargs)
    of_method = {f"module.{name}": x for name, x in state.items()}
    out = torch.func.functional_call(_Method(module, f), of_method, args, kwargs)
    state.update({name.removeprefix("module."): x for name, x in of_method.items()})
    return out


def _own_copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a buffer for this rank to write; a simulated rank's copy must be able to differ from the others."""
    copy = x.clone()
    if not x.is_floating_point():  # a counter is equal on all ranks
        return copy
    for axis in loss_axes():
        if not axis.group:
            copy = torch.where(axis.token >= 0, copy, copy)
    return copy
