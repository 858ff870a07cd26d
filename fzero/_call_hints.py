"""Hints in the errors of calls with wrong arguments: fzero's word for an argument, or an example of the call."""

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch

__all__ = ["call_hints", "explain_call"]

_F = TypeVar("_F", bound=Callable[..., Any])

# What other libraries call an argument, with fzero's words for it: JAX, torch, DeepSpeed, Lightning and Megatron.
_WORDS = {
    "accumulate_grad_batches": ("micro_batches",),
    "accumulation": ("micro_batches",),
    "axes": ("axis",),
    "axis_name": ("axis",),
    "concat_axis": ("concat_dim",),
    "group": ("axis",),
    "process_group": ("axis",),
    "scatter_dimension": ("dim",),
    "split_axis": ("split_dim",),
    "src": ("source",),
    "dst": ("to",),
    "param_dtype": ("param",),
    "reduce_dtype": ("reduce",),
    "batch_size": ("global_batch",),
    "collate_fn": ("collate",),
    "donate_argnums": ("donate",),
    "gradient_accumulation_steps": ("micro_batches",),
    "decay_steps": ("total_steps",),
    "end_value": ("end",),
    "init_value": ("start", "value"),
    "peak_value": ("peak",),
    "level": ("stage",),
    "mixed_precision": ("precision",),
    "mode": ("backend", "stage", "simulate"),
    "mp_policy": ("precision",),
    "num_microbatches": ("micro_batches",),
    "num_micro_batches": ("micro_batches",),
    "policy": ("save", "precision"),
    "reduction": ("reduce",),
    "zero_stage": ("stage",),
}
_OPTIMIZER = "the optimizer's: fzero.optim.offload(opt, ratio)"
_POLICY = "fzero.Precision's: fzero.optim.master_weights(opt, precision), and fzero.value_and_grad(precision=precision)"
_ELSEWHERE = {  # arguments of other libraries that another function of fzero replaces
    "axis_name": "axis=",
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
    "weights_only": "not needed: a checkpoint of fzero holds no pickles",
    "static_argnums": "not needed: arguments that are no tensors are constants of a trace",
}
_CALL_FAILED = r"\b{}\(\) (?:got (?:an unexpected|some positional|multiple values)|missing \d|takes )"  # Python's words


def call_hints(f: _F) -> _F:
    """Decorate a function that runs within steps, whose errors the step shortens: those of wrong calls get hints.

    Example:
        >>> import fzero
        >>> fzero.collectives.psum(torch.ones(2), axis_name="dp")
        Traceback (most recent call last):
        TypeError: psum() got an unexpected keyword argument 'axis_name'
        did you mean axis=, not axis_name=?
    """

    @functools.wraps(f)
    def f_with_call_hints(*args: Any, **kwargs: Any) -> Any:
        """Call the function, and add hints to the error of a call with wrong arguments."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo raises its own errors
            return f(*args, **kwargs)
        try:
            return f(*args, **kwargs)
        except TypeError as error:
            explain_call(error, f, kwargs)
            raise

    return cast("_F", f_with_call_hints)


def explain_call(
    error: TypeError, f: Callable[..., Any], kwargs: Mapping[str, Any], hint: str = "", documented: Any = None
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
    if not notes and (example := _example_of(documented or f)):
        notes = [f"for example, {example}"]
    for note in notes:
        error.add_note(note)


def _failed_at_call(error: TypeError, f: Callable[..., Any]) -> bool:
    """Return whether Python refused the arguments of a call."""
    name = re.escape(getattr(f, "__name__", ""))
    code, trace = getattr(inspect.unwrap(f), "__code__", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return False
        trace = trace.tb_next
    return bool(name and re.search(_CALL_FAILED.format(name), str(error)))


def _example_of(documented: Any) -> str:
    """Return the first call of a function or class in the example of its docstring; "" without one.

    Example:
        >>> import fzero
        >>> _example_of(fzero.shard)
        'fzero.shard(train_step, stage=2, mesh=mesh)'
    """
    name = getattr(documented, "__name__", "")
    lines = [line.strip() for line in (inspect.getdoc(documented) or "").splitlines()]
    source = "\n".join([line[4:] for line in lines if line.startswith((">>> ", "... "))])
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        if name == getattr(call.func, "attr", getattr(call.func, "id", None)):
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
        known = [word for word in words if word in parameters]
        matches = known or difflib.get_close_matches(name, parameters, 1)
        elsewhere = [_ELSEWHERE[word] for word in (name, *words) if word in _ELSEWHERE]
        if name in parameters:
            continue
        if elsewhere and not known:
            nearest.append(f"{name}= is {elsewhere[0]}")
        elif matches:
            nearest.append(f"did you mean {matches[0]}=, not {name}=?")
    return "; ".join(nearest)
