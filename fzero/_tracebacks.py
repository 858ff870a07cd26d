"""Tracebacks of errors in a user's step and in calls of fzero, without the frames of fzero and torch."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from fzero._call_hints import explain_call, find_type_error
from fzero._liveness import find_lost_rank_error
from fzero._torch.recorder import is_fzero_code, is_user_code

__all__ = ["UserFrames", "api_boundary", "api_boundary_of_class", "api_boundary_with", "is_message"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)

_MESSAGE = "_is_message_of_fzero"  # an attribute of errors of which frames of fzero were left out
_NOTE = "(fzero: frames of fzero and torch are left out; python -X dev shows them)"


def api_boundary(f: _F, hint: str = "", documented: Any = None) -> _F:
    """Return a public function whose errors have tracebacks that end at the user's call.

    Args:
        f: the function.
        hint: a note to add to the error of a call with wrong arguments.
        documented: what has the docstring with an example of the call; by default the function.
    """

    @functools.wraps(f)
    def f_with_short_tracebacks(*args: Any, **kwargs: Any) -> Any:
        """Call the function; the error of a call with wrong arguments has hints, or names the argument."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo raises its own errors
            return f(*args, **kwargs)
        with UserFrames():
            try:
                return f(*args, **kwargs)
            except (TypeError, AttributeError) as error:
                explain_call(error, f, kwargs, hint, documented)
                if (of_types := find_type_error(error, f, args, kwargs, documented)) is not None:
                    raise of_types from error
                raise

    return cast("_F", f_with_short_tracebacks)


def api_boundary_with(hint: str) -> Callable[[_F], _F]:
    """Return the decorator `api_boundary` with a hint."""
    return lambda f: api_boundary(f, hint)


def api_boundary_of_class(cls: _C) -> _C:
    """Return a public class, after a change: errors of its constructor have tracebacks that end at the user's call."""
    anything: Any = cls
    anything.__init__ = api_boundary(anything.__init__, documented=cls)
    return cls


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
        if (lost_rank_error := find_lost_rank_error(error)) is not None:
            if error is not None and not sys.flags.dev_mode:
                error.__traceback__ = _user_frames(trace)
            raise lost_rank_error from error
        if not isinstance(error, Exception) or sys.flags.dev_mode:
            return
        # the first entry is the frame of this context
        inner = trace and trace.tb_next
        frames_of_errors = [(e, _user_frames(inner if e is error else e.__traceback__)) for e in _error_chain(error)]
        has_user_frames = any(entries for _, entries in frames_of_errors)
        if not has_user_frames and not is_message(error, inner):
            return
        if not has_user_frames:
            vars(error)[_MESSAGE] = True  # callers further out no longer see it by the frames
        for e, entries in frames_of_errors:
            e.__traceback__ = entries
        if has_user_frames and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)


def is_message(error: Exception, trace: TracebackType | None) -> bool:
    """Return whether fzero raised an error as a message to the user. Errors of other types may be bugs of fzero."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_from_fzero = trace is None or hasattr(error, _MESSAGE) or is_fzero_code(trace.tb_frame.f_code.co_filename)
    return is_from_fzero and isinstance(error, ValueError | TypeError | RuntimeError | OSError)


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
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
        if is_user_code(trace.tb_frame.f_code.co_filename):
            entries.append(trace)
        trace = trace.tb_next
    frames = None
    for entry in reversed(entries):
        frames = TracebackType(frames, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return frames
