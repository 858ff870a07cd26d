"""Where an operation runs: the user's line, and the node of autograd.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_watched.py` shows which.
"""

import os
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from fzero._torch.recorder import is_user_code

__all__ = ["current_call_site"]

_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = (os.path.join(_TORCH, "autograd") + os.sep, os.path.join(_TORCH, "_functorch") + os.sep)
_FUNC = os.path.join(_TORCH, "_functorch", "eager_transforms.py")
_RUNS = ("grad_and_value_impl", "_vjp_with_argnums")
_COLLECTIVES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "collectives") + os.sep


class _CallSite(NamedTuple):
    """The place in the code where an operation runs.

    Attributes:
        line: "file:line" of the user's code, or "" if there is none. In a backward pass it is the line of the forward
            operation.
        backward: the running node of autograd, such as "SqrtBackward0"; "" outside a backward pass.
        collective: whether the operation is part of a collective.
        forward: whether torch.func is running a function that it differentiates.
        sequence_number: the number of autograd's newest node; in a backward pass that of the running node.
    """

    line: str
    backward: str
    collective: bool
    forward: bool = False
    sequence_number: int = -1


def current_call_site() -> _CallSite:
    """Return the call site of the operation that is being watched."""
    node: Any = torch._C._current_autograd_node()
    frames = list(_caller_frames())
    user_frame = next((f for f in frames if _is_user_file(f.f_code.co_filename)), None)
    collective = any(f.f_code.co_filename.startswith(_COLLECTIVES) for f in frames)
    line = f"{user_frame.f_code.co_filename}:{user_frame.f_lineno}" if user_frame is not None else ""
    if node is None:
        is_forward = any(f.f_code.co_filename == _FUNC and f.f_code.co_name in _RUNS for f in frames)
        newest = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]
        return _CallSite(line=line, backward="", collective=collective, forward=is_forward, sequence_number=newest)
    engine = next((f for f in frames if f.f_code.co_filename.startswith(_ENGINE)), None)
    # a line in the user's own backward function, called by the engine, is nearer than the forward operation's line
    in_backward = user_frame is not None and engine is not None and frames.index(user_frame) < frames.index(engine)
    name = node.name if isinstance(node.name, str) else node.name()  # under torch.func a Function's name is a string
    number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
    return _CallSite(
        line=line if in_backward else _user_line(node) or line,
        backward=name,
        collective=collective,
        forward=False,
        sequence_number=number,
    )


def _caller_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_user_file(file: str) -> bool:
    """Return whether a file belongs to the user, or to a library other than torch, fzero and Python's own."""
    return is_user_code(file) and (not file.startswith(_STANDARD) or _INSTALLED in file)


def _user_line(node: Any) -> str:
    """Return the user's line that made a node of autograd; "" if it is unknown."""
    for entry in reversed(node.metadata.get("traceback_") or ()):
        match = re.match(r'\s*File "(.+)", line (\d+)', entry)
        if match is not None and _is_user_file(match[1]):
            return f"{match[1]}:{match[2]}"
    return ""
