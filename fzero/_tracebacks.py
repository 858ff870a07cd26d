"""Tracebacks of errors in a user's step, without the frames of fzero and torch."""

import sys
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
        shown = _of_users(trace and trace.tb_next)  # the first is the frame of this context
        if shown is None:
            return
        error.__traceback__ = shown
        for earlier in (error.__cause__, error.__context__):
            if earlier is not None:
                earlier.__traceback__ = _of_users(earlier.__traceback__) or earlier.__traceback__
        if NOTE not in getattr(error, "__notes__", ()):
            error.add_note(NOTE)


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
