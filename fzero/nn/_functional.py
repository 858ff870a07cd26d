"""functional: a module as a pure function of its parameters and buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.modules import statistics
from fzero._tracebacks import api_boundary
from fzero.axes.lockstep import in_lockstep
from fzero.axes.scope import bound, data_axes
from fzero.init._module import stand_ins
from fzero.layout.boxes import is_box
from fzero.moe.transformers import use_differentiable
from fzero.nn._blocks import boxes_to_blocks, rematerialise
from fzero.nn._checks import check_module, check_tensors, explain_old_function
from fzero.nn._closures import check_functions, copy_module
from fzero.nn._written import before_call, check_left, check_written, held, put_back, versions_of
from fzero.tp._install import install
from fzero.tp._layers import Layers

__all__ = ["Apply", "Functional", "functional"]

Tensors = dict[str, torch.Tensor]


class Functional(NamedTuple):
    """A module taken apart: `apply, params, buffers = functional(module)`.

    Attributes:
        apply: the module as a pure function; see `Apply`.
        params: the trainable parameters by name; a tied parameter has one name.
        buffers: copies of the buffers, and the module's own frozen parameters (`requires_grad=False`), by name.
    """

    apply: "Apply"
    params: Tensors
    buffers: Tensors


@api_boundary
def functional(
    module: torch.nn.Module, remat: bool | str | Callable[[Any], bool] = False, tp: Layers | None = None
) -> Functional:
    """Take a module apart into a pure function, its parameters and its buffers.

    Parameters are the module's own, detached, and `step.init` copies them. Buffers are copies, so that a jitted step
    may take them over and the module keeps its own. `apply` keeps only a copy of the module without storage (on the
    meta device). By the default rule each of the module's repeated blocks is a unit.

    `apply` is the module as it is now: its training or evaluation mode, its tied and frozen parameters, its forward
    hooks and the objects that these are methods of. A later `module.eval()` or `head.weight = embed.weight` does not
    reach it: take the module apart again, as in `functional(module.eval()).apply`. Nor does a value that forward leaves
    in an attribute (`self.aux = ...`) reach the module: have forward return it.

    Experts of transformers that run by its default, "grouped_mm", run by fzero's implementation in `apply`. The default
    is an operator that `torch.func` refuses.

    Args:
        module: any module without hooks on gradients or on the backward pass.
        remat: whether each repeated block keeps only its inputs, and runs again in the backward pass. Repeated blocks
            are numbered children, `"h.0"`, as in the default rule of units. "matmuls", or a function of an operation,
            says which results are kept besides (see `fzero.remat`). Then `apply` takes boxes too: within
            `value_and_grad(loss_fn, gather=False)` a block's parameters are gathered for it alone, in either pass. A
            language model runs with `use_cache=False`.
        tp: the layers that are cut over an axis, as `fzero.tp.layers(module)` lists them. Give their rule to
            `fzero.shard(split=tp.split)`. Where the axis is not bound `apply` is the whole module.

    Returns:
        `(apply, params, buffers)`.

    Raises:
        TypeError: if `module` is no module; if it, or one inside it, is wrapped by DDP or FSDP, or is compiled, or
            holds a DTensor. These synchronise by themselves, and under torch.func they silently do not.
        ValueError: if a parameter or buffer is uninitialised (lazy modules). Also if a parameter has a hook on its
            gradient, which torch.func never calls, or a module one on its backward pass, which it refuses. Also if an
            attribute holds a tensor that was computed of parameters. Also if a function in an attribute, or a forward
            hook, holds a parameter itself, or reads the module as a global.

    Example:
        >>> import fzero
        >>> apply, params, buffers = functional(torch.nn.Linear(3, 2))
        >>> [(name, list(p.shape)) for name, p in params.items()]
        [('weight', [2, 3]), ('bias', [2])]
        >>> y, buffers = apply(params, buffers, torch.ones(4, 3))
        >>> y.shape
        torch.Size([4, 2])
    """
    check_module(module)
    check_functions(module)
    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    constants = {**buffers, **frozen}
    copied, mutable = copy_module(module, stand_ins(module)), _mutable(module)
    use_differentiable(copied)
    if tp is not None:
        params, constants = tp.unpack(params), tp.unpack(constants)
        install(copied, tp)
    blocks = rematerialise(copied, None if remat is True else remat, mutable) if remat else ()
    apply = Apply(copied, frozenset(params), frozenset(constants), mutable, blocks, tp)
    return Functional(apply, params, constants)


class _ApplyMemory:
    """The memory of an `Apply`, filled as it is called.

    Attributes:
        copies: in lockstep each rank's copy of the module, by the rank's place on the mesh.
        seen: the structures of arguments with which a call was looked at.
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[int, ...], torch.nn.Module] = {}
        self.seen: set[Any] = set()


@dataclass(frozen=True)
class Apply:
    """A module as a pure function.

    Attributes:
        module: the module without storage.
        params: the names of its trainable parameters.
        buffers: the names of its buffers and frozen parameters.
        mutable: the names of the buffers that its forward pass may write in place.
        blocks: the names of the submodules that run again in the backward pass.
        tp: the layers that are cut over an axis, whose ranks are given the same arguments.
    """

    module: torch.nn.Module
    params: frozenset[str]
    buffers: frozenset[str]
    mutable: frozenset[str]
    blocks: tuple[str, ...] = ()
    tp: Layers | None = None
    _memory: _ApplyMemory = field(default_factory=_ApplyMemory, repr=False, compare=False)

    def __call__(self, params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """Run the module's forward pass.

        A value that it leaves in an attribute, where nobody finds it, is named in a notice at the first call.

        Args:
            params: the parameters by name, whole; with `remat` they may be boxes.
            buffers: the buffers and frozen parameters by name; with `remat` the latter may be boxes.
            *args: the arguments of the module's forward.
            **kwargs: likewise.

        Returns:
            `(output, buffers)`: the new buffers, such as BatchNorm's running statistics. They are this rank's: make
            them replicated, `fzero.pmean(buffers)`, before a step returns them.

        Raises:
            TypeError: if `params` or `buffers` is no dict of tensors. For boxes: gather them first, as
                `fzero.value_and_grad` does.
            ValueError: if names are missing or unknown. Where layers are cut over an axis, also if the arguments of
                forward are known to differ by rank along it.
            RuntimeError: if the forward pass wrote a parameter, or in place a buffer that is not in `mutable`. Also if
                it applies an `autograd.Function` that `torch.func` cannot differentiate.
        """
        check_tensors(params, self.params, "params", type(self.module).__name__, boxes=bool(self.blocks))
        check_tensors(buffers, self.buffers, "buffers", type(self.module).__name__, boxes=bool(self.blocks))
        if self.tp is not None:
            self.tp.check_shared({**{str(i): x for i, x in enumerate(args)}, **kwargs})
        own = {name: _own_copy(buffers[name]) for name in sorted(self.mutable)}
        with boxes_to_blocks(self._own_module(), self.blocks, {**params, **buffers, **own}) as state:
            out = self._run(state, args, kwargs)
        return out, {**buffers, **{name: state[name] for name, x in buffers.items() if not is_box(x)}}

    def _run(self, state: Tensors, args: Any, kwargs: Any) -> Any:
        """Run forward on `state`, in which new buffers take the old ones' places; check its other writes."""
        module = self._own_module()
        if torch.compiler.is_dynamo_compiling():  # which refuses side effects by itself
            return torch.func.functional_call(module, state, args, kwargs)
        structure = tree.flatten((args, kwargs))[1]  # later calls with such arguments leave the same behind
        is_new = structure not in self._memory.seen
        versions, before = versions_of(state), held(module) if is_new else None
        stand_ins = before_call(module)
        try:
            out = torch.func.functional_call(module, state, args, kwargs)
            check_written(versions, state, self.params, self.mutable)
            if before is not None:
                check_left(before, module)
                self._memory.seen.add(structure)
        except RuntimeError as error:
            explain_old_function(error, type(module).__name__)
            raise
        finally:
            put_back(stand_ins, traced=is_tracing())
        return out

    def _own_module(self) -> torch.nn.Module:
        """Return the module to run: in lockstep the rank's own, since functional_call writes into it while it runs."""
        if not in_lockstep():
            return self.module
        rank, copies = tuple([axis.rank for axis in bound()]), self._memory.copies
        if rank not in copies:
            shared = {id(x): x for x in [*self.module.parameters(), *self.module.buffers()]}  # which nobody writes
            copies[rank] = copy_module(self.module, shared)
        return copies[rank]


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
        for name, b in statistics(m).items() if m.training else ():
            if b.is_floating_point() or b.numel() == 1:
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names & dict(module.named_buffers()).keys())
