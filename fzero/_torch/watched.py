"""Private torch APIs that watch operations as they run, with real values.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_watched.py` shows which.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fzero._torch.recorder import is_user_code

__all__ = [
    "WatchedOperation",
    "current_call_site",
    "record_node_lines",
    "watch_operations",
    "without_watchers",
]

_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = (os.path.join(_TORCH, "autograd") + os.sep, os.path.join(_TORCH, "_functorch") + os.sep)
_FUNC = os.path.join(_TORCH, "_functorch", "eager_transforms.py")
_RUNS = ("grad_and_value_impl", "_vjp_with_argnums")
_COLLECTIVES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "collectives") + os.sep


class WatchedOperation(NamedTuple):
    """A running operation.

    Attributes:
        name: its name, such as "aten::log".
        arguments: the tensors among its arguments.
        mutated_arguments: the tensors among its arguments that it writes into.
        numbers: the floats among its arguments.
    """

    name: str
    arguments: list[torch.Tensor]
    mutated_arguments: list[torch.Tensor]
    numbers: list[float]


class _Watch(TorchDispatchMode):
    """Passes each operation to `before` before it runs, and to `after` with its results."""

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
    ) -> None:
        super().__init__()
        self.before, self.after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func, args, kwargs)
        context = self.before(operation)
        out = func(*args, **kwargs)
        self.after(operation, context, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)])
        return out


def _operation(func: Any, args: Any, kwargs: Any) -> WatchedOperation:
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    numbers = [x for x in leaves if isinstance(x, float)]
    if not isinstance(func, OpOverload):
        return WatchedOperation(str(func), tensors, [], numbers)
    by_name = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    outputs = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [x for name in outputs for x in tree_leaves(by_name.get(name)) if isinstance(x, torch.Tensor)]
    return WatchedOperation(func._schema.name, tensors, written, numbers)


@contextmanager
def watch_operations(
    before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
) -> Iterator[None]:
    """Watch each operation that runs in this context, also in ranks in lockstep.

    Args:
        before: called with the operation before it runs.
        after: called with the operation, the value that `before` returned, and the tensors among the results.
    """
    with _Watch(before, after):
        yield


@contextmanager
def without_watchers() -> Iterator[None]:
    """Run code in this context without any dispatch mode, so that no watcher sees its operations."""
    with _disable_current_modes():
        yield


@contextmanager
def record_node_lines() -> Iterator[None]:
    """Make autograd record the source line of each node that is made in this context."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(True, check_nan=False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(*before)


# Where an operation runs: the user's line, and the node of autograd.


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
    frames = list(_frames())
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
        line=line if in_backward else _line_of(node) or line,
        backward=name,
        collective=collective,
        forward=False,
        sequence_number=number,
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_user_file(file: str) -> bool:
    """Return whether a file belongs to the user, or to a library other than torch, fzero and Python's own."""
    return is_user_code(file) and (not file.startswith(_STANDARD) or _INSTALLED in file)


def _line_of(node: Any) -> str:
    """Return the user's line that made a node of autograd; "" if it is unknown."""
    for entry in reversed(node.metadata.get("traceback_") or ()):
        match = re.match(r'\s*File "(.+)", line (\d+)', entry)
        if match is not None and _is_user_file(match[1]):
            return f"{match[1]}:{match[2]}"
    return ""
