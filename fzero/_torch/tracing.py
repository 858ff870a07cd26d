"""Private torch APIs that record a step as a graph.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_torch.py` shows which.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # pyright: ignore[reportPrivateUsage]
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from fzero._torch.levels import unwrap
from fzero._torch.memory import in_buffers
from fzero._torch.recorder import Recorder, is_user_code, user_line

__all__ = [
    "TRACING",
    "DataDependentError",
    "OpOverload",
    "functionalize",
    "in_chunk",
    "is_backward",
    "is_stand_in",
    "memory_like",
    "node_chunk",
    "node_line",
    "node_stack",
    "recorded_nodes",
    "set_compiling",
    "set_stand_in_device",
    "stand_in_at",
    "stand_ins_like",
    "trace",
    "user_line",
]


class _Assignments(TorchFunctionMode):
    """Refuses `x.data = y` while a step is traced, because the assignment runs no operation that could be recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:  # not `is`: each access to __set__ makes a new object
            raise RuntimeError(
                f"fzero.jit: the step assigns to a tensor's .data at {user_line()}, which a graph cannot hold; a step "
                "is pure: use the new value from there on (x = y, not x.data = y)"
            )
        return func(*args, **(kwargs or {}))


_SET_DATA: Any = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


TRACING = threading.RLock()
"""The lock held while a step is traced, because the modes and flags of a trace belong to the process."""


def node_line(node: torch.fx.Node) -> str:
    """Return the source line that a node was traced from, "file:line", or "" if it is unknown."""
    return (node.meta.get("custom") or {}).get("line", "")


def node_stack(node: torch.fx.Node) -> tuple[str, ...]:
    """Return the functions and modules that a node was traced in, the outermost first; () if they are unknown."""
    return (node.meta.get("custom") or {}).get("stack", ())


def is_backward(node: torch.fx.Node) -> bool:
    """Return whether autograd's engine ran a node's operation when it was traced."""
    return (node.meta.get("custom") or {}).get("backward", False)


def in_chunk(index: int) -> AbstractContextManager[None]:
    """Mark the operations of a `with` block as those of a chunk, which is compiled apart from other chunks."""
    return annotate({"chunk": index})


def node_chunk(node: torch.fx.Node) -> int | None:
    """Return the chunk that a node's operation was marked with, if any."""
    return (node.meta.get("custom") or {}).get("chunk")


def stand_ins_like(
    tensors: Sequence[torch.Tensor], beside: Any = None, mode: FakeTensorMode | None = None
) -> list[torch.Tensor]:
    """Return stand-ins for tracing: tensors of the same shapes, strides, dtypes and devices that own no memory.

    The stand-in of a meta tensor is on the CPU. All stand-ins of one graph share a mode: pass `mode`, or an earlier
    stand-in as `beside`. The stand-ins of tensors that fill one buffer fill one buffer, too.
    """

    def empty(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=x.dtype, device="cpu" if x.is_meta else x.device)

    with mode or _fake_mode([] if beside is None else [beside]):
        return in_buffers(tensors, empty)


def memory_like(nbytes: int) -> torch.UntypedStorage:
    """Return a storage without memory that stands in for `nbytes` bytes."""
    return torch.UntypedStorage(nbytes, device="meta")


def stand_in_at(x: torch.Tensor, memory: torch.UntypedStorage, geometry: Sequence[int]) -> torch.Tensor:
    """Return a stand-in with the dtype and device of another one, in other memory and with other strides.

    Args:
        x: the stand-in that gives the dtype and the device.
        memory: the storage of the result. Stand-ins can share one.
        geometry: the shape, then the strides, then the storage offset of the result.
    """
    assert isinstance(x, FakeTensor)
    shape, strides, offset = geometry[: x.dim()], geometry[x.dim() : -1], geometry[-1]
    meta = torch.empty(0, dtype=x.dtype, device="meta").set_(memory, offset, shape, strides)  # pyright: ignore
    return FakeTensor(x.fake_mode, meta, x.fake_device)


def set_stand_in_device(stand_ins: Iterable[Any], kind: str) -> None:
    """Set the device of stand-ins to another kind, such as "cuda", which this machine need not have.

    Autograd asks a device for its streams. So a step is traced on a device that exists, and its stand-ins are moved
    afterwards.
    """
    for x in stand_ins:
        if isinstance(x, FakeTensor):
            x.fake_device = torch.device(kind, 0)


def _fake_mode(stand_ins: Sequence[torch.Tensor]) -> FakeTensorMode:
    mode = next((x.fake_mode for x in stand_ins if isinstance(x, FakeTensor)), None)
    return FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode


@contextmanager
def set_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true, as torch.export does. Models check it before they read values."""
    was_compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was_compiling


class DataDependentError(RuntimeError):
    """Traced code needed the value of a tensor, at the source line `line`."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


def _traceback_line(error: BaseException) -> str:
    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if is_user_code(line)), "")


def trace(f: Callable[..., Any], stand_ins: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Record the aten operations of `f(*stand_ins)` as a graph; `f` maps a flat list of tensors to a flat list.

    It uses make_fx rather than Dynamo. make_fx records the operations that really ran, through every transform of
    torch.func and every autograd.Function, and traces any Python. Dynamo can lose a Function's backward
    (pytorch#193279).

    Raises:
        DataDependentError: if `f` reads the value of a tensor.
    """

    def with_lines(*xs: torch.Tensor) -> Any:
        with _Assignments(), Recorder():
            return f(*xs)

    # in the stand-ins' mode nothing is computed, and no random number is drawn
    # anomaly mode is off, because it reads every gradient for NaNs, and stand-ins have no values
    quiet = torch.autograd.set_detect_anomaly(False)
    with preserve_node_meta(), set_compiling(), quiet, _fake_mode(stand_ins), _without_values(), _without_log():
        return _make_fx(with_lines, stand_ins)


# texts in torch's errors -> how the traced code needs a value
_READS = {
    "value out of a tracing tensor": "a tensor's value",
    "FakeTensor.__format__": "a format, as f'{loss:.3f}'",
    ".numpy() is not supported for tensor subclasses": ".numpy()",
}


@contextmanager
def _without_values() -> Iterator[None]:
    """Raise a `DataDependentError` where torch needs the value of a tensor, since stand-ins have no values."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise DataDependentError(str(error.func), _traceback_line(error)) from error
    except (RuntimeError, TypeError) as error:
        if reading := next((reading for text, reading in _READS.items() if text in str(error)), None):
            raise DataDependentError(reading, _traceback_line(error)) from error
        raise


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that fails on its stand-ins; the error is also raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(record: logging.LogRecord) -> bool:
        return "attempting to run meta" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _make_fx(f: Callable[..., Any], stand_ins: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Record a function as a graph, without generating code for its module, which never runs."""
    with _use_lazy_graph_module(True):
        return make_fx(f, _allow_non_fake_inputs=True)(*stand_ins)


def recorded_nodes() -> list[torch.fx.Node]:
    """List the nodes that the running trace has recorded so far."""
    mode: Any = get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


def functionalize(gm: torch.fx.GraphModule, stand_ins: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Trace a graph again with every in-place operation replaced by an operation that returns a new value.

    Raises:
        DataDependentError: if the graph reads the value of a constant that was overwritten with data.
    """
    run = torch.func.functionalize(_WithConstants(gm).run, remove="mutations")
    with preserve_node_meta(), torch.no_grad(), _fake_mode(stand_ins), _without_values():
        return _make_fx(run, stand_ins)


class _WithConstants(torch.fx.Interpreter):
    """Runs a graph under functionalize, and wraps its constants: functionalize itself wraps only the arguments."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant, wrapped, because an operation may write into a copy of it, as batch_norm does."""
        x = super().get_attr(target, args, kwargs)
        level = functorch.peek_interpreter_stack().level()
        return functorch._wrap_functional_tensor(x, level) if isinstance(x, torch.Tensor) else x


def is_stand_in(x: Any) -> bool:
    """Return whether a value is a stand-in without memory, or a transform's tensor around one."""
    return isinstance(unwrap(x) if isinstance(x, torch.Tensor) else x, FakeTensor)
