"""functional: a module as a pure function of its parameters and buffers, and the checks of its arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import is_old_function_error, is_tracing
from fzero._torch.levels import is_differentiated
from fzero._torch.modules import attributes, gradient_hooks, has_backward_hook, persistent_buffers
from fzero._torch.types import NamedTensors
from fzero._tracebacks import api_boundary
from fzero.axes import bound_axes, in_lockstep, loss_axes
from fzero.nn._context import checked_context
from fzero.nn._copy import (
    LeftoverCheck,
    check_functions,
    check_leftovers,
    check_writes,
    copy_module,
    module_states,
    record_contents,
    record_versions,
    restore_modules,
    shared_tensors,
    tensors_in,
)
from fzero.nn._lazy_logits import check_head, install_lazy_logits
from fzero.nn._products import ProductsLike, install_products, products_of
from fzero.nn._remat_blocks import boxes_to_blocks, remat_blocks
from fzero.parallel.context import install as install_context
from fzero.parallel.experts import use_differentiable
from fzero.parallel.tensor import Layers, install
from fzero.sharding import is_box
from fzero.zero import stand_ins

__all__ = [
    "Apply",
    "Functional",
    "check_module",
    "check_tensors",
    "explain_old_function",
    "functional",
    "mutable_buffers",
    "tensors_of",
]

# Checks of the arguments of `functional` and `apply`: modules that can become pure functions, and dicts of tensors.


WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "SyncBatchNorm"}


def check_module(module: object, is_copied: bool = True) -> None:
    """Check that a module can be taken apart.

    Args:
        module: the module.
        is_copied: whether `apply` runs a copy of it.

    Raises:
        TypeError: if it is not a module. Also if a module in it is wrapped or compiled, or holds a DTensor.
        ValueError: if a tensor is uninitialised or has a hook, a module has a hook on its backward pass, or an
            attribute holds a computed tensor.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
    for name, m in module.named_modules():
        _check_kind(name, m)
        _check_backward_hook(name, m)
        if is_copied:
            _check_attributes(name, m)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(x):
            raise ValueError(f"{name!r} is not initialised: run the lazy module once on a batch first")
        if type(x).__name__ == "DTensor" or type(x.data).__name__ == "DTensor":
            raise TypeError(f"{name!r} is a DTensor: pass a plain module; fzero.shard does the sharding")
        _check_hooks(name, x)


def _check_kind(name: str, module: torch.nn.Module) -> None:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if wrapper := kinds & WRAPPERS:
        raise TypeError(
            f"module {name!r} is {wrapper.pop()}, whose own synchronisation does not work under torch.func: pass the "
            "plain module; fzero.shard does the sharding"
        )
    if "OptimizedModule" in kinds:
        raise TypeError(f"module {name!r} is compiled; pass the plain module and compile the sharded step")


def _check_backward_hook(name: str, module: torch.nn.Module) -> None:
    if has_backward_hook(module):
        raise ValueError(
            f"module {name!r} has a hook on its backward pass (register_full_backward_hook), which torch.func does "
            "not support: remove it, and read or change the gradients that fzero.value_and_grad returns"
        )


def _check_attributes(name: str, module: torch.nn.Module) -> None:
    for attribute, value in attributes(module).items():
        if any(x.grad_fn is not None for x in tensors_in(value)):  # a copy of it would have no gradient
            path = f"{name}.{attribute}" if name else attribute
            raise ValueError(
                f"attribute {path!r} holds a tensor that was computed from parameters: delete it if an earlier "
                "call left it there, and compute weights with torch.nn.utils.parametrizations, not a hook (weight_norm)"
            )


def _check_hooks(name: str, x: torch.Tensor) -> None:
    # It is ambiguous which gradient a hook should see: DDP's hooks see this rank's gradient, FSDP's the reduced shard.
    for method in gradient_hooks(x):
        raise ValueError(
            f"{name!r} has a hook on its gradient ({method}), which torch.func never calls: remove it, and change the "
            "gradients between fzero.value_and_grad and opt.update, in a transform of the optimizer's chain. A mask of "
            f"rows goes into the loss: p = params[{name!r}]; p = torch.where(mask, p, p.detach())"
        )


def check_tensors(tensors: object, names: frozenset[str], label: str, kind: str, boxes: bool) -> None:
    """Check that a dict holds tensors of the expected names.

    Args:
        tensors: the dict.
        names: the expected names, those of a module of class `kind`.
        label: the name of the dict, for messages.
        kind: the name of the module's class.
        boxes: whether boxes may stand for tensors.

    Raises:
        TypeError: if `tensors` is no dict, or holds anything but tensors.
        ValueError: if names are missing or unknown.
    """
    if not isinstance(tensors, dict):
        raise TypeError(
            f"{label} is a {type(tensors).__name__}: expected a dict of tensors by name, as fzero.nn.functional returns"
        )
    for name, x in tensors.items():
        if is_box(x) and not boxes:
            raise TypeError(
                f"{kind} was given {x!r} for {name!r}, which is a box and not a tensor: call it inside "
                "fzero.value_and_grad, or on fzero.gather(params)"
            )
        if name in names and not is_box(x) and not isinstance(x, torch.Tensor):
            raise TypeError(f"{label}: {name!r} is a {type(x).__name__}, expected a tensor")
    if tensors.keys() != names:
        missing, extra = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
        raise ValueError(f"{label} do not match the module {kind}: missing {missing}, unknown {extra}")


def check_one_device(params: dict[str, Any], buffers: dict[str, Any], kind: str) -> None:
    """Check that the buffers of a module of class `kind` lie where its parameters lie; numbers need not.

    Raises:
        ValueError: if a buffer lies elsewhere. The message names it.
    """
    devices = {x.device: name for name, x in params.items() if not is_box(x)}
    for name, x in buffers.items() if len(devices) == 1 else ():
        if not is_box(x) and x.ndim and x.device not in devices:
            device, parameter = next(iter(devices.items()))
            raise ValueError(
                f"{kind}: buffer {name!r} is on {x.device}, and parameter {parameter!r} is on {device}: "
                "buffers = mesh.device_put(buffers) after fzero.nn.functional"
            )


def explain_old_function(error: RuntimeError, name: str) -> None:
    """Explain the error of a module that applies an `autograd.Function` of torch's older form.

    Raises:
        RuntimeError: if `error` is such an error.
    """
    if is_old_function_error(error):
        raise RuntimeError(
            f"fzero.nn.functional: {name} applies an autograd.Function, or an operator of a library, without "
            "setup_context, which torch.func cannot differentiate. The traceback names its line. Evaluation mode, "
            "functional(module.eval()), or the module's configuration may select another implementation. Otherwise "
            "replace that module, or give the Function a setup_context"
        ) from error


# functional: a module as a pure function of its parameters and buffers.


class Functional(NamedTuple):
    """A module taken apart: `apply, params, buffers = functional(module)`.

    Attributes:
        apply: the module as a pure function; see `Apply`.
        params: the trainable parameters by name; a tied parameter has one name.
        buffers: copies of the buffers, and the module's own frozen parameters (`requires_grad=False`), by name.
    """

    apply: "Apply"
    params: NamedTensors
    buffers: NamedTensors


@api_boundary
def functional(
    module: torch.nn.Module,
    remat: bool | str | Callable[[Any], bool] = False,
    tp: Layers | None = None,
    *,
    context: str | None = None,
    products: ProductsLike = None,
    chunked_loss: bool = False,
    ignore_writes: Sequence[str] = (),
) -> Functional:
    """Take a module apart into a pure function, its parameters and its buffers.

    The returned parameters are the module's own, detached; `step.init` copies them. The buffers are copies, so a
    jitted step may donate them and the module keeps its own. `apply` keeps only a copy of the module without storage
    (on the meta device). By the default rule each repeated block of the module is a unit.

    `apply` is a snapshot of the module: its training or evaluation mode, its tied and frozen parameters, its forward
    hooks and the objects whose methods these are. A later `module.eval()` or `head.weight = embed.weight` does not
    change it: call `functional` again, as in `functional(module.eval()).apply`. Likewise, a value that forward stores
    in an attribute (`self.aux = ...`) does not reach the module: have forward return it, or read it in a program of
    `apply.method`. A tensor that depends on parameters is refused there, and in a trace also a changed number or flag.

    Experts of transformers run by default with "grouped_mm", an operator that `torch.func` refuses. In `apply` they
    run with fzero's implementation instead.

    Args:
        module: any module without hooks on gradients or on the backward pass.
        remat: whether each repeated block saves only its inputs, and runs again in the backward pass. Repeated blocks
            are numbered children, such as `"h.0"`, as in the default rule of units. "matmuls", or a function of an
            operation, selects results to save besides the inputs (see `fzero.remat`). With remat `apply` also takes
            boxes. Within `value_and_grad(loss_fn, gather=False)` each block then gathers only its own parameters, in
            both passes. A language model needs `use_cache=False`.
        tp: the layers that are split over an axis, as `fzero.parallel.tensor.layers(module)` lists them. Pass their
            rule to `fzero.shard(split=tp.split)`. If the axis is not bound, `apply` runs the full module.
        context: the axis over which the tokens of sequences are split, such as "cp", for a model of transformers. Its
            attention then runs across the ranks, and `position_ids` are those of this rank's tokens. Documents are
            passed as `apply(.., documents=)`, in place of a mask.
        products: "float8" for linear layers within repeated blocks that multiply in float8, or a `fzero.nn.Products`,
            which says how and which layers.
        chunked_loss: whether the loss of a model of transformers is `fzero.nn.linear_cross_entropy`, whose logits never
            exist as a whole. The model's own code shifts labels and takes the mean. `logits` of its output have no
            numbers: `torch.nn.functional.cross_entropy` takes them, and anything else is an error.
        ignore_writes: the paths of attributes that forward may write although the writes are lost, as "layers.0.seen"
            or by a pattern of `fnmatch`, "layers.*.seen". They must be constants for every result of the module.

    Returns:
        `(apply, params, buffers)`.

    Raises:
        TypeError: if `module` is not a module. Also if a module in it is wrapped by DDP or FSDP or compiled, or holds
            a DTensor: these would silently not synchronise under torch.func. Also if `context` names an axis, or
            `chunked_loss` is set, and the module is no model of transformers.
        ValueError: if a parameter or buffer is uninitialised (lazy modules). Also if a parameter has a hook on its
            gradient, which torch.func never calls, or a module has a hook on its backward pass, which torch.func
            refuses. Also if an attribute holds a tensor that was computed from parameters. Also if a function in an
            attribute, or a forward hook, holds a parameter itself, or reads the module as a global. Also if a
            model with `context` combines tokens otherwise than by attention; the message names the module. Also if
            the head of a model with `chunked_loss` is no linear layer.

    Example:
        >>> import fzero
        >>> apply, params, buffers = functional(torch.nn.Linear(3, 2))
        >>> [(name, list(p.shape)) for name, p in params.items()]
        [('weight', [2, 3]), ('bias', [2])]
        >>> y, buffers = apply(params, buffers, torch.ones(4, 3))
        >>> y.shape
        torch.Size([4, 2])
    """
    if isinstance(ignore_writes, str):
        raise TypeError(f"ignore_writes={ignore_writes!r} is a str: expected a list of paths, [{ignore_writes!r}]")
    context_axis = None if context is None else checked_context(module, context)
    head = check_head(module) if chunked_loss else None
    params, frozen, buffers = tensors_of(module)
    buffers = {name: x.clone() for name, x in buffers.items()}
    buffers_and_frozen, mutable = {**buffers, **frozen}, mutable_buffers(module)
    copied = copy_module(module, stand_ins(module))
    use_differentiable(copied)
    policy = products_of(products)
    linears = {} if policy is None else policy.linears(copied)
    if tp is not None:
        params, buffers_and_frozen = tp.unpack(params), tp.unpack(buffers_and_frozen)
        install(copied, tp, linears)
    install_products(copied, {name: f for name, f in linears.items() if tp is None or name not in tp.styles})
    if head is not None:
        install_lazy_logits(copied, head, tp)
    if context_axis is not None:
        install_context(copied, context_axis)
    blocks = remat_blocks(copied, None if remat is True else remat, mutable) if remat else ()
    names = frozenset(params), frozenset(buffers_and_frozen)
    apply = Apply(copied, *names, mutable, blocks, tp, tuple(ignore_writes))
    return Functional(apply, params, buffers_and_frozen)


def tensors_of(module: torch.nn.Module, is_copied: bool = True) -> tuple[NamedTensors, NamedTensors, NamedTensors]:
    """Check a module, and return its trainable parameters, its frozen parameters and its buffers, by name."""
    check_module(module, is_copied)
    check_functions(module)
    named = dict(module.named_parameters())
    params = {name: p.detach() for name, p in named.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in named.items() if not p.requires_grad}
    return params, frozen, {name: b.detach() for name, b in module.named_buffers()}


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
        blocks: the names of the submodules that run again in the backward pass.
        tp: the layers that are split over an axis. The ranks along that axis receive the same arguments.
        ignore_writes: patterns of the attributes that forward may write although the writes are lost.
        prefix: the module's name in a larger module, with a dot; it begins the paths of attributes.
        is_own: whether `module` is the caller's, which gets what a call leaves in an attribute.
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
    _cache: _ApplyCache = field(default_factory=_ApplyCache, repr=False, compare=False)

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
            >>> apply, params, buffers = functional(torch.nn.Linear(3, 2))
            >>> decay = apply.method(lambda module: module.weight.square().sum())
            >>> decay(params, buffers)[0].shape
            torch.Size([])
        """

        def run(params: NamedTensors, buffers: NamedTensors, *args: Any, **kwargs: Any) -> tuple[Any, NamedTensors]:
            return self._call(f, params, buffers, args, kwargs)

        return run

    def _call(
        self, f: Callable[..., Any] | None, params: NamedTensors, buffers: NamedTensors, args: Any, kwargs: Any
    ) -> tuple[Any, NamedTensors]:
        """Run `f` on the module, or by default its forward pass, with these tensors."""
        check_tensors(params, self.param_names, "params", type(self.module).__name__, boxes=bool(self.blocks))
        check_tensors(buffers, self.buffer_names, "buffers", type(self.module).__name__, boxes=bool(self.blocks))
        check_one_device(params, buffers, type(self.module).__name__)
        if self.tp is not None:
            self.tp.check_shared({**{str(i): x for i, x in enumerate(args)}, **kwargs})
        copies = {name: _own_copy(buffers[name]) for name in sorted(self.mutable_names)}
        with boxes_to_blocks(self._own_module(), self.blocks, {**params, **buffers, **copies}) as state:
            out = self._run(f, state, args, kwargs)
        return out, {**buffers, **{name: state[name] for name, x in buffers.items() if not is_box(x)}}

    def _run(self, f: Callable[..., Any] | None, state: NamedTensors, args: Any, kwargs: Any) -> Any:
        """Run `f` on `state`, where writes replace mutable buffers, and check its other writes."""
        module = self._own_module()
        if torch.compiler.is_dynamo_compiling():  # Dynamo refuses side effects itself
            return _call_on(module, f, state, args, kwargs)
        # Calls with equal structures leave the same values behind. A function's code stands for it: the function may
        # be made anew at each call, and hold tensors.
        is_traced, differentiated = is_tracing(), any(map(is_differentiated, state.values()))
        structure = getattr(f, "__code__", f), tree.flatten((args, kwargs))[1], differentiated
        is_new = not self.is_own and (is_traced or structure not in self._cache.structures)
        versions, before = record_versions(state), record_contents(module) if is_new else None
        stand_ins = module_states(module)
        try:
            out = _call_on(module, f, state, args, kwargs)
            check_writes(versions, state, self.param_names, self.mutable_names)
            if before is not None:
                kind = type(module).__name__
                check = LeftoverCheck(kind, self.prefix, self.ignore_writes, is_traced, has_program=f is not None)
                check_leftovers(before, module, check)
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
    copied = x.clone()
    for axis in loss_axes() if x.is_floating_point() else ():  # a counter is equal on all ranks
        if not axis.group:
            copied = torch.where(axis.token >= 0, copied, copied)
    return copied


def mutable_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of buffers that forward may write: a training module's persistent statistics and counters."""
    names = set()
    for prefix, m in module.named_modules():
        for name, b in persistent_buffers(m).items() if m.training else ():
            if b.is_floating_point() or b.numel() == 1:
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names & dict(module.named_buffers()).keys())
