"""Tracebacks of errors in a user's step and in calls of fzero, without the frames of fzero and torch."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from fzero._liveness import lost_rank_error_of
from fzero._torch.recorder import is_fzero_code, is_user_code

__all__ = ["UserFrames", "api_boundary", "api_boundary_of_class", "api_boundary_with", "is_message"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)

# What other libraries call an argument, with fzero's words for it: JAX, torch, DeepSpeed, Lightning and Megatron.
_WORDS = {
    "accumulate_grad_batches": ("micro_batches",),
    "accumulation": ("micro_batches",),
    "axis_name": ("axis",),
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
# Arguments of other libraries that another function of fzero replaces.
_ELSEWHERE = {
    "axis_name": "axis=",
    "config": "the arguments of fzero.shard, fzero.value_and_grad and fzero.jit, as docs/vocabulary.md lists them",
    "cpu_offload": _OPTIMIZER,
    "device_id": "the mesh's: fzero.mesh(dp=4, device=...)",
    "gradient_accumulation_steps": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "gradient_clipping": "the optimizer's: fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), opt)",
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
_NOTE = "(fzero: frames of fzero and torch are left out; python -X dev shows them)"


def api_boundary(f: _F, hint: str = "") -> _F:
    """Return a public function whose errors have tracebacks that end at the user's call.

    Args:
        f: the function.
        hint: a note to add to the error of a call with wrong arguments.
    """

    @functools.wraps(f)
    def f_with_short_tracebacks(*args: Any, **kwargs: Any) -> Any:
        """Call the function, and add hints to the error of a call with wrong arguments."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo raises its own errors
            return f(*args, **kwargs)
        with UserFrames():
            try:
                return f(*args, **kwargs)
            except TypeError as error:
                trace = error.__traceback__
                if trace is not None and trace.tb_next is None:  # the call failed before a line of f ran
                    for note in (hint, _nearest(f, kwargs)):
                        if note:
                            error.add_note(note)
                raise

    return cast("_F", f_with_short_tracebacks)


def api_boundary_with(hint: str) -> Callable[[_F], _F]:
    """Return the decorator `api_boundary` with a hint."""
    return lambda f: api_boundary(f, hint)


def api_boundary_of_class(cls: _C) -> _C:
    """Return a public class, after a change: errors of its constructor have tracebacks that end at the user's call."""
    anything: Any = cls
    anything.__init__ = api_boundary(anything.__init__)
    return cls


def _nearest(f: Callable[..., Any], names: Iterable[str]) -> str:
    """Return a hint that names for each unknown name the parameter of `f` with its meaning, or the nearest one.

    The hint is "" if no parameter is near.
    """
    parameters = list(inspect.signature(f).parameters)
    nearest = []
    for name in names:
        known = [word for word in _WORDS.get(name, ()) if word in parameters]
        matches = known or difflib.get_close_matches(name, parameters, 1)
        if name in parameters:
            continue
        if name in _ELSEWHERE and not known:
            nearest.append(f"{name}= is {_ELSEWHERE[name]}")
        elif matches:
            nearest.append(f"did you mean {matches[0]}=, not {name}=?")
    return "; ".join(nearest)


class UserFrames:
    """A context that reduces the traceback of an error to the frames of the user's code.

    So the last line is the user's line that raised the error, as without transforms. If no user code ran within the
    context and fzero raised the error, the traceback ends at the user's call. If torch raised it, all frames stay. In
    Python's development mode all frames of all errors stay. The error of a connection to a lost rank becomes the
    `LostRankError` that names the rank.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Shorten the traceback of an error that is a message, or raise the error that names a lost rank."""
        if (lost := lost_rank_error_of(error)) is not None:
            if error is not None and not sys.flags.dev_mode:
                error.__traceback__ = _user_frames(trace)
            raise lost from error
        if not isinstance(error, Exception) or sys.flags.dev_mode:
            return
        # the first entry is the frame of this context
        inner = trace and trace.tb_next
        reduced = [(e, _user_frames(inner if e is error else e.__traceback__)) for e in _chain(error)]
        has_user_frames = any(entries for _, entries in reduced)
        if not has_user_frames and not is_message(error, inner):
            return
        for e, entries in reduced:
            e.__traceback__ = entries
        if has_user_frames and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)


def is_message(error: Exception, trace: TracebackType | None) -> bool:
    """Return whether fzero raised an error as a message to the user. Errors of other types may be bugs of fzero."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_from_fzero = trace is None or is_fzero_code(trace.tb_frame.f_code.co_filename)
    return is_from_fzero and isinstance(error, ValueError | TypeError | RuntimeError | OSError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause, and so on."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the frames that run user code; None if there are none."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries += [trace] if is_user_code(trace.tb_frame.f_code.co_filename) else []
        trace = trace.tb_next
    reduced = None
    for entry in reversed(entries):
        reduced = TracebackType(reduced, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return reduced
