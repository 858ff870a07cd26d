"""functional: take a module apart into a pure function, its parameters and its buffers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fzero._arguments import check_remat
from fzero._names import missing_members
from fzero._torch.modules import persistent_buffers
from fzero._torch.types import NamedTensors
from fzero._tracebacks import api_boundary
from fzero.nn._apply import Apply
from fzero.nn._context import check_context
from fzero.nn._copy import check_functions, copy_module
from fzero.nn._lazy_logits import check_head, install_lazy_logits
from fzero.nn._matmul_precision import MatmulPrecisionLike, install_matmuls, read_matmul_precision
from fzero.nn._module_checks import check_module
from fzero.nn._remat_blocks import remat_blocks
from fzero.parallel.context import install as install_context
from fzero.parallel.context import rope_types
from fzero.parallel.experts import use_differentiable
from fzero.parallel.tensor import Layers, install
from fzero.zero import stand_ins

__all__ = ["Functional", "functional", "list_tensors", "mutable_buffers", "scratch_buffers"]


_FOREIGN_NAMES = {  # names of torch.nn's modules
    "parameters": "model.params, a dict by name",
    "named_parameters": "model.params, a dict by name",
    "named_buffers": "model.buffers, a dict by name",
    "state_dict": "{**model.params, **model.buffers}, two dicts by name",
    "load_state_dict": "the module's, before fzero.nn.functional(module); or pass other dicts to model.apply",
    "train": "the module's, before fzero.nn.functional(module.train())",
    "eval": "the module's, before fzero.nn.functional(module.eval())",
    "to": "not needed: step.init puts model.params on the mesh's device, and mesh.device_put(model.buffers) the rest",
    "cuda": "not needed: step.init puts model.params on the mesh's device, and mesh.device_put(model.buffers) the rest",
    "half": "fzero.optim.master_weights(opt, fzero.Precision(param=torch.float16))",
    "bfloat16": "fzero.optim.master_weights(opt, fzero.Precision(param=torch.bfloat16))",
    "forward": "model.apply(params, buffers, *inputs)",
    "zero_grad": "not needed: fzero.value_and_grad returns gradients and keeps none",
    "requires_grad_": "the module's, before fzero.nn.functional(module): frozen parameters are in model.buffers",
    "modules": "the module's: fzero.nn.functional(module) keeps no values in modules",
    "init": "model.params, which step.init(model.params, opt) puts on the mesh",
    "save_pretrained": "fzero.checkpoint.hf.write(folder, params)",
}


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

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)


@api_boundary
def functional(
    module: torch.nn.Module,
    remat: bool | str | Callable[[Any], bool] = False,
    tp: Layers | None = None,
    *,
    context: str | None = None,
    matmul_precision: MatmulPrecisionLike = None,
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
            rule to `fzero.shard(split=layers.split)`. If the axis is not bound, `apply` runs the full module.
        context: the axis over which the tokens of sequences are split, such as "cp", for a model of transformers. Its
            attention then runs across the ranks, and `position_ids` are those of this rank's tokens. Documents are
            passed as `apply(.., documents=)`, in place of a mask.
        matmul_precision: "float8" for linear layers within repeated blocks that multiply in float8, or a
            `fzero.nn.MatmulPrecision`, which says how and which layers.
        chunked_loss: whether the loss of a model of transformers is `fzero.nn.linear_cross_entropy`, whose logits never
            exist as a whole. The model's own code shifts labels and takes the mean. `logits` of its output have no
            numbers: `torch.nn.functional.cross_entropy` takes them, and anything else is an error.
        ignore_writes: the paths of attributes that forward may write although the writes are lost, as "layers.0.seen"
            or by a pattern of `fnmatch`, "layers.*.seen". They must be constants for every result of the module.

    Returns:
        `(apply, params, buffers)`.

    Raises:
        TypeError: if `module` is not a module, or `tp` is not its layers. Also if a module in it is wrapped by DDP or
            FSDP or compiled, or holds a DTensor: these would silently not synchronise under torch.func. Also if
            `context` names an axis, or `chunked_loss` is set, and the module is no model of transformers.
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
    if tp is not None and not isinstance(tp, Layers):
        raise TypeError(
            f"tp={tp!r}: expected the layers of the module, fzero.parallel.tensor.layers(module), which takes a plan, "
            "a dict from names to styles"
        )
    context_axis = None if context is None else check_context(module, context)
    head = check_head(module) if chunked_loss else None
    params, frozen, buffers = list_tensors(module)
    buffers = {name: x.clone() for name, x in buffers.items()}
    buffers_and_frozen, mutable, scratch = {**buffers, **frozen}, mutable_buffers(module), scratch_buffers(module)
    module_copy = copy_module(module, stand_ins(module))
    use_differentiable(module_copy)
    policy = read_matmul_precision(matmul_precision)
    linears = {} if policy is None else policy.linears(module_copy)
    if tp is not None:
        params, buffers_and_frozen = tp.unpack(params), tp.unpack(buffers_and_frozen)
        install(module_copy, tp, linears)
    install_matmuls(module_copy, {name: f for name, f in linears.items() if tp is None or name not in tp.styles})
    if head is not None:
        install_lazy_logits(module_copy, head, tp)
    if context_axis is not None:
        install_context(module_copy, context_axis)
    check_remat("remat", remat)
    blocks = ()
    if remat:
        blocks = remat_blocks(module_copy, None if remat is True else remat, mutable | scratch)
    apply = Apply(
        module=module_copy,
        param_names=frozenset(params),
        buffer_names=frozenset(buffers_and_frozen),
        mutable_names=mutable,
        blocks=blocks,
        tp=tp,
        ignore_writes=(*ignore_writes, *[f"{path}*long_inv_freq" for path in _longrope_paths(module)]),
        scratch_names=scratch,
    )
    return Functional(apply, params, buffers_and_frozen)


def list_tensors(module: torch.nn.Module, is_copied: bool = True) -> tuple[NamedTensors, NamedTensors, NamedTensors]:
    """Check a module, and return its trainable parameters, its frozen parameters and its buffers, by name."""
    check_module(module, is_copied)
    check_functions(module)
    params_by_name = dict(module.named_parameters())
    params = {name: p.detach() for name, p in params_by_name.items() if p.requires_grad}
    frozen = {name: p.detach() for name, p in params_by_name.items() if not p.requires_grad}
    return params, frozen, {name: b.detach() for name, b in module.named_buffers()}


def mutable_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of buffers that forward may write: a training module's persistent statistics and counters."""
    names = set()
    for prefix, m in module.named_modules():
        if not m.training:
            continue
        for name, b in persistent_buffers(m).items():
            if b.is_floating_point() or b.numel() == 1:
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names & dict(module.named_buffers()).keys())


def scratch_buffers(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of buffers that forward writes before it reads them: frequencies of transformers' "longrope".

    Each forward pass chooses the frequencies for the length of its sequences, and copies them into the buffer.
    """
    paths = tuple(_longrope_paths(module))
    return frozenset(
        [
            name
            for name, _ in module.named_buffers()
            if name.startswith(paths) and name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        ]
    )


def _longrope_paths(module: torch.nn.Module) -> list[str]:
    """List the paths of the rotary embeddings of this kind, each with a dot at its end. They cache the long set."""
    paths = [path for path, m in module.named_modules() if "longrope" in rope_types(m)]
    return [f"{path}." if path else "" for path in paths]
