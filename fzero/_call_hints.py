"""Hints in the errors of calls with wrong arguments: fzero's word for one, its type, or an example of the call."""

import ast
import difflib
import dis
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from types import TracebackType
from typing import Any

import torch

from fzero._arguments import show_value
from fzero._torch.recorder import is_user_code

__all__ = ["explain_call", "find_type_error"]

_RAISE = dis.opmap["RAISE_VARARGS"]
_TYPE_WORDS = {int: "an int", float: "a number", str: "a string", torch.Tensor: "a torch.Tensor", type(None): "None"}
_ANYTHING = (Any, object, inspect.Parameter.empty)

# What other libraries call an argument, with fzero's words for it: JAX, torch, DeepSpeed, Lightning and Megatron.
_WORDS = {
    "accumulate_grad_batches": ("micro_batches",),
    "accumulation": ("micro_batches",),
    "auto_wrap_policy": ("units",),
    "axes": ("axis",),
    "axis_name": ("axis",),
    "communication_data_type": ("reduce",),
    "concat_axis": ("concat_dim",),
    "fullgraph": ("strict",),
    "grad_accum_dtype": ("grad",),
    "group": ("axis",),
    "initial_scale_power": ("initial",),
    "loss_scale_window": ("growth_interval",),
    "process_group": ("axis",),
    "scatter_dimension": ("dim",),
    "split_axis": ("split_dim",),
    "update": ("update_on",),
    "src": ("source",),
    "dst": ("to",),
    "param_dtype": ("param",),
    "reduce_dtype": ("reduce",),
    "batch_size": ("global_batch",),
    "collate_fn": ("collate",),
    "device_mesh": ("mesh",),
    "donate_argnums": ("donate",),
    "gradient_accumulation_steps": ("micro_batches",),
    "decay_steps": ("total_steps",),
    "end_value": ("end",),
    "init_value": ("start", "value"),
    "peak_value": ("peak",),
    "level": ("stage",),
    "mtbf": ("device_mtbf_seconds", "run_mtbf_seconds"),
    "links": ("axis_bandwidths",),
    "mixed_precision": ("precision",),
    "mode": ("backend", "stage", "simulate"),
    "mp_policy": ("precision",),
    "num_microbatches": ("micro_batches",),
    "num_micro_batches": ("micro_batches",),
    "policy": ("save", "precision"),
    "reduction": ("reduce",),
    "world": ("world_size",),
    "zero_stage": ("stage",),
}
_OPTIMIZER = "the optimizer's: fzero.optim.offload(opt, ratio)"
_POLICY = "fzero.Precision's: fzero.optim.master_weights(opt, precision), and fzero.value_and_grad(precision=precision)"
_AXIS = "an axis of the mesh, such as tp of fzero.mesh(dp=2, tp=2)"
_RATE = "the optimizer's rate: fzero.optim.adamw(fzero.optim.warmup_cosine(peak, warmup_steps, total_steps))"
_RESULTS = "not needed: a PerRank or a Shard differs by rank, and a plain value does not, which a simulation checks"
_UNITS = "not needed: units of fzero.shard gather and reduce, and an unused leaf has a zero gradient"
_REMAT = "fzero.remat(block), or fzero.nn.functional(module, remat=True)"
_FOREIGN_ARGUMENTS = {  # arguments of other libraries that another function of fzero replaces
    "axis_name": "axis=",
    "activation_checkpointing": _REMAT,
    "gradient_checkpointing": _REMAT,
    "autotp_size": _AXIS,
    "ep_size": _AXIS,
    "mpu": _AXIS,
    "tensor_parallel": _AXIS,
    "tp_size": _AXIS,
    "auto_wrap_policy": "units= of fzero.shard, such as fzero.sharding.by_size(params, max_numel=10**8)",
    "stage3_module_granularity_threshold": "units= of fzero.shard: fzero.sharding.by_size(params, min_numel=10**6)",
    "max_group_size": "units= of fzero.shard: fzero.sharding.by_size(params, max_numel=10**8)",
    "bf16": _POLICY,
    "fp16": _POLICY,
    "communication_data_type": "fzero.Precision's reduce=",
    "grad_accum_dtype": "fzero.Precision's grad=",
    "bf16_optimizer_states": 'the optimizer\'s: fzero.optim.adamw(rate, moments="bfloat16")',
    "zero_quantized_weights": "fzero.Precision's gather=fzero.codecs.int8()",
    "zero_quantized_gradients": "fzero.Precision's reduce=fzero.codecs.int4()",
    "enable_fsdp_float8_all_gather": "fzero.Precision's gather=fzero.codecs.float8()",
    "broadcast_buffers": "fzero.collectives.pmean(buffers), before the step returns them",
    "bucket_cap_mb": _UNITS,
    "find_unused_parameters": _UNITS,
    "gradient_as_bucket_view": _UNITS,
    "static_graph": _UNITS,
    "check_rep": _RESULTS,
    "check_vma": _RESULTS,
    "in_specs": _RESULTS,
    "out_specs": _RESULTS,
    "fsdp_plugin": "stage= of fzero.plugs.accelerate.shard_loop",
    "hostfile": "torchrun's or srun's: fzero.mesh finds their processes",
    "hysteresis": "not in fzero: fzero.optim.dynamic_loss_scale halves the scale at each overflow",
    "initial_scale_power": "fzero.optim.dynamic_loss_scale's initial=",
    "loss_scale_window": "fzero.optim.dynamic_loss_scale's growth_interval=",
    "lr_scheduler": _RATE,
    "scheduler": _RATE,
    "mics_shard_size": 'over="gpu" of fzero.shard(..., axis=("node", "gpu"))',
    "zero_hpz_partition_size": 'axis=("dp", "host") of fzero.shard on fzero.mesh(host=-1, dp=8)',
    "pad_to_multiple_of": "pad= of fzero.data.batches: fzero.data.padding(lengths, global_batch=32)",
    "gradient_predivide_factor": "not needed: the loss is divided before the sums",
    "prescale_gradients": "not needed: the loss is divided before the sums",
    "ratio": _OPTIMIZER,
    "train_micro_batch_size_per_gpu": "fzero.value_and_grad(loss_fn, micro_batches=4), as fzero.data.batch_plan says",
    "zero_allow_untested_optimizer": "not needed: fzero.testing.is_exact_on_shards(opt) tests one",
    "config": "the arguments of fzero.shard, fzero.value_and_grad and fzero.jit, as docs/vocabulary.md lists them",
    "cpu_offload": _OPTIMIZER,
    "device_id": "the mesh's: fzero.mesh(dp=4, device=...)",
    "gradient_accumulation_steps": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "gradient_clipping": "the optimizer's: fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), opt)",
    "generator": "the first argument, a key: fzero.random.key(0)",
    "tiled": "not needed: a gather concatenates, and never stacks",
    "op": "the function's name: psum adds, and pmean averages",
    "max_norm": "the optimizer's: fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), opt)",
    "map_location": "like='s: a leaf is read to the device of its tensor there",
    "max_grad_norm": "the optimizer's: fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), opt)",
    "micro_batches": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "mixed_precision": _POLICY,
    "mp_policy": _POLICY,
    "offload_optimizer": _OPTIMIZER,
    "offload_param": "the optimizer's, at stage 3: fzero.optim.offload(opt, ratio, params=True)",
    "offload_params": "the optimizer's, at stage 3: fzero.optim.offload(opt, ratio, params=True)",
    "offload_policy": _OPTIMIZER,
    "optimizer": "step.init's: params, opt_state = step.init(params, opt)",
    "precision": _POLICY,
    "reshard_after_forward": "the stage's: 3 gathers a unit again for its backward pass, and 2 keeps full parameters",
    "shard_fn": "split=, over= and units=",
    "static_argnames": "not needed: arguments that are no tensors are constants of a trace",
    "use_reentrant": "not needed: blocks run again under torch.func, which has no tape",
    "preserve_rng_state": "not needed: a block's draws depend on a key, as fzero.random.seeded gives them",
    "overwrite": "not needed: a save replaces the folder's checkpoint when it is whole",
    "weights_only": "not needed: a checkpoint of fzero holds no pickles",
    "static_argnums": "not needed: arguments that are no tensors are constants of a trace",
}
_CALL_FAILED = r"\b{}\(\) (?:got (?:an unexpected|some positional|multiple values)|missing \d|takes )"  # Python's words


def explain_call(
    error: Exception, f: Callable[..., Any], kwargs: Mapping[str, Any], hint: str = "", documented: Any = None
) -> None:
    """Add notes to the error of a call that failed before a line of the function ran; leave any other error as it is.

    Args:
        error: the error.
        f: the function that was called.
        kwargs: the keyword arguments of the call.
        hint: a note for every wrong call.
        documented: what has the docstring with an example of the call; by default the function.
    """
    if not _failed_at_call(error, f):
        return
    notes = [note for note in (hint, _nearest(f, kwargs)) if note]
    if not notes and (example := _find_example(documented or f)):
        notes = [f"for example, {example}"]
    for note in notes:
        error.add_note(note)


def _failed_at_call(error: Exception, f: Callable[..., Any]) -> bool:
    """Return whether Python refused the arguments of a call."""
    name = re.escape(getattr(f, "__name__", ""))
    code, trace = getattr(inspect.unwrap(f), "__code__", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return False
        trace = trace.tb_next
    return bool(name and re.search(_CALL_FAILED.format(name), str(error)))


def _find_example(documented: Any) -> str:
    """Return the first call of a function or class in the example of its docstring; "" without one.

    Example:
        >>> import fzero
        >>> _find_example(fzero.shard)
        'fzero.shard(train_step, stage=2, mesh=mesh)'
    """
    name = getattr(documented, "__name__", "")
    lines = [line.strip() for line in (inspect.getdoc(documented) or "").splitlines()]
    source = "\n".join([line[4:] for line in lines if line.startswith((">>> ", "... "))])
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        is_whole = all(keyword.arg for keyword in call.keywords)  # without ** of options from elsewhere
        if is_whole and name == getattr(call.func, "attr", getattr(call.func, "id", None)):
            return " ".join((ast.get_source_segment(source, call) or "").split())
    return ""


def _nearest(f: Callable[..., Any], names: Iterable[str]) -> str:
    """Return a hint that names for each unknown name the parameter of `f` with its meaning, or the nearest one.

    The hint is "" if no parameter is near.
    """
    parameters = list(inspect.signature(f).parameters)
    nearest = []
    for name in names:
        words = _WORDS.get(name, ())
        known_words = [word for word in words if word in parameters]
        matches = known_words or difflib.get_close_matches(name, parameters, 1)
        elsewhere = [_FOREIGN_ARGUMENTS[word] for word in (name, *words) if word in _FOREIGN_ARGUMENTS]
        if name in parameters:
            continue
        if elsewhere and not known_words:
            nearest.append(f"{name}= is {elsewhere[0]}")
        elif matches:
            nearest.append(f"did you mean {matches[0]}=, not {name}=?")
        else:
            nearest.append(f"the arguments are {', '.join([p for p in parameters if p != 'self']) or 'none'}")
    return "; ".join(nearest)


def find_type_error(
    error: Exception,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    documented: Any = None,
) -> TypeError | None:
    """Return the error that names the arguments whose types are not those of a function's annotations.

    Annotations are read only after Python or torch has stumbled over a value.

    Args:
        error: what the call raised.
        f: the function that was called.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        documented: what has the docstring with an example of the call; by default the function.

    Returns:
        None if the types are right, if the error is a message already, or if the user's code raised it.
    """
    if _is_meant(error.__traceback__):
        return None
    mismatches = [
        f"{name} is {show_value(value)}: expected {' or '.join(map(_word, classes))}"
        for name, value, classes in _typed_arguments(f, args, kwargs)
        if not isinstance(value, (*classes, Number) if float in classes else classes)
    ]
    if not mismatches:
        return None
    example = _find_example(documented or f)
    return TypeError(f"{f.__name__}(): {'; '.join(mismatches)}{f', as in {example}' if example else ''}")


def _is_meant(trace: TracebackType | None) -> bool:
    """Return whether an error passed through the user's code, or a statement `raise` made it."""
    if trace is None:  # an inner call of fzero left its frames out
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
        if is_user_code(trace.tb_frame.f_code.co_filename):
            return True
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def _typed_arguments(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Yield name, value and classes of each argument whose annotation is a class, or a union of classes."""
    try:
        signature = inspect.signature(f)
        values = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function in C, or arguments that do not fit
        return
    for name, value in values.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if classes := _classes(parameter.annotation):
            yield name, value, classes


def _classes(annotation: Any) -> tuple[type, ...]:
    """Return the classes of an annotation; () if it says more, as a protocol or a string does.

    Example:
        >>> _classes(int | None), _classes(list[int]), _classes(Any)
        ((<class 'int'>, <class 'NoneType'>), (), ())
    """
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    parts: tuple[Any, ...] = typing.get_args(annotation) if is_union else (annotation,)
    is_plain = all(
        isinstance(part, type) and part not in _ANYTHING and not getattr(part, "_is_protocol", False) for part in parts
    )
    return parts if is_plain else ()


def _word(kind: type) -> str:
    """Write a class in a message, as "a Mesh"."""
    return _TYPE_WORDS.get(kind) or f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
