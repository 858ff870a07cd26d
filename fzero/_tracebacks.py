"""Tracebacks of errors in a user's step, without the frames of fzero and torch."""

import sys
from collections.abc import Iterator
from types import TracebackType

from fzero._torch.recorder import is_users

__all__ = ["UsersFrames"]

NOTE = "(fzero: frames of fzero and torch are left out; python -X dev shows them)"


class UsersFrames:
    """A context that leaves of an error's traceback the frames of the user's code, if it passed through any.

    So the line that raised is the last, as it is without transforms. In Python's development mode all frames stay.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or sys.flags.dev_mode:
            return
        # the first entry is the frame of this context
        own = trace and trace.tb_next
        shown = [(e, _of_users(own if e is error else e.__traceback__)) for e in _chain(error)]
        if not any(entries for _, entries in shown):
            return
        for e, entries in shown:
            e.__traceback__ = entries
        if NOTE not in getattr(error, "__notes__", ()):
            error.add_note(NOTE)


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
