"""Private torch APIs that show operations as they run, with real values, and the memory that they take.

They were seen on torch 2.11 and 2.13. `tests/_torch/test_watched.py` says which one broke when torch changes.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fzero._torch.levels import profiling
from fzero._torch.recorder import is_users

__all__ = [
    "Allocations",
    "CallSite",
    "Memory",
    "WatchedOperation",
    "allocations",
    "is_real",
    "lines_of_nodes",
    "memory_of",
    "place_now",
    "unwatched",
    "watching",
]

# Private torch APIs that tell what the CPU's allocator does while something runs.
#
# They were seen on torch 2.11 and 2.13. `tests/_torch/test_allocations.py` says which one broke when torch changes.


class Allocations:
    """What the CPU's allocator did: `peak` is the most that was held at once beside what was held before, in bytes.

    It is None while it runs, and where a profiler of the user's was on.
    """

    peak: int | None = None


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Follow this thread's allocations, and those of the threads that torch starts for it; others' are not seen.

    This is the profiler from before Kineto. It tells the same events, and logs nothing.
    """
    found = Allocations()
    if profiling():
        yield found
        return
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    config: Any = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        threads = autograd._disable_profiler_legacy()
    found.peak = _peak(threads)


def _peak(threads: list[list[Any]]) -> int:
    """Return the most that is held at once, by the events of all threads in the order of their times."""
    events = [e for thread in threads for e in thread]
    start = next(e for e in events if e.name() == "__start_profile")
    memory = [e for e in events if e.kind() == "memory_alloc"]
    held = peak = 0
    for event in sorted(memory, key=start.cpu_elapsed_us):
        held += event.cpu_memory_usage()
        peak = max(peak, held)
    return peak


# Private torch APIs that show each operation as it runs, with real values, and which line and memory it belongs to.


_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = (os.path.join(_TORCH, "autograd") + os.sep, os.path.join(_TORCH, "_functorch") + os.sep)
_FUNC = os.path.join(_TORCH, "_functorch", "eager_transforms.py")
_RUNS = ("grad_and_value_impl", "_vjp_with_argnums")
_COLLECTIVES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "collectives") + os.sep


class WatchedOperation(NamedTuple):
    """An operation that runs.

    Attributes:
        name: such as "aten::log".
        given: its tensors.
        written: those of them that it writes into.
        numbers: its other arguments that are floats.
    """

    name: str
    given: list[torch.Tensor]
    written: list[torch.Tensor]
    numbers: list[float]


class _Watch(TorchDispatchMode):
    """Shows each operation before it runs, and after it with its results."""

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
    ) -> None:
        super().__init__()
        self.before, self.after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func, args, kwargs)
        known = self.before(operation)
        out = func(*args, **kwargs)
        self.after(operation, known, [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)])
        return out


def _operation(func: Any, args: Any, kwargs: Any) -> WatchedOperation:
    leaves = tree_leaves((args, kwargs))
    given = [x for x in leaves if isinstance(x, torch.Tensor)]
    numbers = [x for x in leaves if isinstance(x, float)]
    if not isinstance(func, OpOverload):
        return WatchedOperation(str(func), given, [], numbers)
    named = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    writes = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [x for name in writes for x in tree_leaves(named.get(name)) if isinstance(x, torch.Tensor)]
    return WatchedOperation(func._schema.name, given, written, numbers)


@contextmanager
def watching(
    before: Callable[[WatchedOperation], Any], after: Callable[[WatchedOperation, Any, Any], None]
) -> Iterator[None]:
    """Show each operation that runs within, those of ranks in lockstep too.

    Args:
        before: called with the operation before it runs.
        after: called with it, with what `before` returned, and with the tensors among its results.
    """
    with _Watch(before, after):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Run what is within without what looks at operations."""
    with _disable_current_modes():
        yield


@contextmanager
def lines_of_nodes() -> Iterator[None]:
    """Have autograd note which line made each node, within."""
    found = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(True, check_nan=False)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(*found)


# ---------------------------------------------------------------- lines


class CallSite(NamedTuple):
    """Where an operation runs.

    Attributes:
        line: "file:line" of the user's; "" where there is none. Of a backward pass, that of the forward operation.
        backward: the node of autograd that runs, such as "SqrtBackward0"; "" outside a backward pass.
        collective: whether it is part of a collective.
        forward: whether torch.func runs a function there that it differentiates.
    """

    line: str
    backward: str
    collective: bool
    forward: bool = False


def place_now() -> CallSite:
    """Return where the operation that is shown now runs."""
    node: Any = torch._C._current_autograd_node()
    frames = list(_frames())
    users = next((f for f in frames if _is_users_own(f.f_code.co_filename)), None)
    collective = any(f.f_code.co_filename.startswith(_COLLECTIVES) for f in frames)
    line = f"{users.f_code.co_filename}:{users.f_lineno}" if users is not None else ""
    if node is None:
        return CallSite(
            line, "", collective, any(f.f_code.co_filename == _FUNC and f.f_code.co_name in _RUNS for f in frames)
        )
    engine = next((f for f in frames if f.f_code.co_filename.startswith(_ENGINE)), None)
    # a line that the engine has called, a backward of the user's own, is nearer than the forward operation's
    called = users is not None and engine is not None and frames.index(users) < frames.index(engine)
    name = node.name if isinstance(node.name, str) else node.name()  # that of a Function under torch.func is its own
    return CallSite(line if called else _line_of(node) or line, name, collective)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users_own(file: str) -> bool:
    """Return whether a file is the user's, or of a library that is neither torch, fzero nor Python's own."""
    return is_users(file) and (not file.startswith(_STANDARD) or _INSTALLED in file)


def _line_of(node: Any) -> str:
    """Return the user's line that made a node of autograd; "" if it is not known."""
    for entry in reversed(node.metadata.get("traceback_") or ()):
        found = re.match(r'\s*File "(.+)", line (\d+)', entry)
        if found is not None and _is_users_own(found[1]):
            return f"{found[1]}:{found[2]}"
    return ""


# ---------------------------------------------------------------- memory


class Memory(NamedTuple):
    """The memory of a tensor: a range of bytes of a storage, of which no other takes the number while this is held.

    Attributes:
        storage: its number.
        first: the first byte.
        stop: the byte after the last.
        held: what knows whether the storage is gone, without keeping its data.
    """

    storage: int
    first: int
    stop: int
    held: StorageWeakRef

    @property
    def gone(self) -> bool:
        """Whether nobody has the storage any more."""
        return self.held.expired()


def memory_of(x: torch.Tensor) -> Memory:
    """Return the memory of a tensor that has some."""
    storage, size = x.untyped_storage(), x.element_size()
    first = int(x.storage_offset())
    last = first + sum([int(n - 1) * int(stride) for n, stride in zip(x.shape, x.stride(), strict=True)])
    return Memory(storage._cdata, first * size, (last + 1) * size, StorageWeakRef(storage))


def is_real(x: torch.Tensor) -> bool:
    """Return whether a tensor has values that lie in memory, at least one."""
    return not isinstance(x, FakeTensor) and not x.is_meta and x.layout is torch.strided and x.numel() > 0
