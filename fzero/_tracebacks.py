"""Tracebacks of errors in a user's step, and in calls of fzero, without the frames of fzero and torch."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from fzero._torch.recorder import is_fzeros, is_users

__all__ = ["UsersFrames", "api_boundary", "api_boundary_with"]

F = TypeVar("F", bound=Callable[..., Any])

NOTE = "(fzero: frames of fzero and torch are left out; python -X dev shows them)"


def api_boundary(f: F, hint: str = "") -> F:
    """Return a public function, errors of which are at the user's call, and not in it.

    Args:
        f: the function.
        hint: what to say besides, if it is called with arguments that it does not take.
    """

    @functools.wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # Dynamo, which has errors of its own
            return f(*args, **kwargs)
        with UsersFrames():
            try:
                return f(*args, **kwargs)
            except TypeError as error:
                trace = error.__traceback__
                if trace is not None and trace.tb_next is None:  # no line of f has run
                    for note in (hint, _nearest(f, kwargs)):
                        if note:
                            error.add_note(note)
                raise

    return cast("F", called)


def api_boundary_with(hint: str) -> Callable[[F], F]:
    """Return `api_boundary` with a hint."""
    return lambda f: api_boundary(f, hint)


def _nearest(f: Callable[..., Any], names: Iterable[str]) -> str:
    """Name the argument that was meant by one that a function does not take; "" where there is none."""
    known = list(inspect.signature(f).parameters)
    near = [(name, difflib.get_close_matches(name, known, 1)) for name in names if name not in known]
    return "; ".join([f"did you mean {found[0]}= by {name}=?" for name, found in near if found])


class UsersFrames:
    """A context that leaves of an error's traceback the frames of the user's code.

    So the line that raised is the last, as it is without transforms. An error that passed through no code of the user
    is at the user's call if fzero itself raised it. What torch raised on its own keeps all frames. In Python's
    development mode all errors do.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or sys.flags.dev_mode:
            return
        # the first entry is the frame of this context
        own = trace and trace.tb_next
        shown = [(e, _of_users(own if e is error else e.__traceback__)) for e in _chain(error)]
        through = any(entries for _, entries in shown)  # code of the user
        if not through and not _is_answer(error, own):
            return
        for e, entries in shown:
            e.__traceback__ = entries
        if through and NOTE not in getattr(error, "__notes__", ()):
            error.add_note(NOTE)


def _is_answer(error: Exception, trace: TracebackType | None) -> bool:
    """Return whether fzero raised an error to tell the user something; another kind may be a fault of fzero's own."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = trace is None or is_fzeros(trace.tb_frame.f_code.co_filename)
    return raised and isinstance(error, ValueError | TypeError | RuntimeError | OSError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what caused it, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_users(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback of those frames that run a user's code; None if none does."""
    kept: list[TracebackType] = []
    while trace is not None:
        kept += [trace] if is_users(trace.tb_frame.f_code.co_filename) else []
        trace = trace.tb_next
    shown = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
