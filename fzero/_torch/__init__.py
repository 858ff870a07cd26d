"""Every use of a private torch API, with the versions it was seen on.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_torch.py` says which one broke when torch changes.
"""

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo import allow_in_graph, assume_constant_result  # pyright: ignore[reportPrivateImportUsage]
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TRACING",
    "DataDependentError",
    "OpOverload",
    "TorchDispatchMode",
    "allow_in_graph",
    "assume_constant_result",
    "c10d",
    "default_store",
    "fake_like",
    "functional",
    "group_of",
    "in_transform",
    "inductor",
    "is_tracing",
    "line_of",
    "profiling",
    "pytree",
    "quiet_vmap_fallback",
    "raise_priority",
    "recorded",
    "register_box",
    "storage_id",
    "thread_state",
    "trace",
    "user_line",
]

c10d: Any = torch.ops._c10d_functional
"""The functional collectives: `all_reduce`, `all_gather_into_tensor`, `reduce_scatter_tensor`, `wait_tensor`."""


def is_tracing() -> bool:
    """Tell whether Dynamo or make_fx records the operations that this thread runs now."""
    # not is_compiling(), which is the process's: another thread may be tracing
    return torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None


def in_transform() -> bool:
    """Tell whether code runs under a transform of torch.func (grad, vmap, ...), or is traced."""
    return is_tracing() or functorch.peek_interpreter_stack() is not None


group_of: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
"""Returns the process group of a name, as collectives are given it."""


def default_store() -> torch.distributed.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store that the processes of the world have in common."""
    return distributed_c10d._get_default_store()


def profiling() -> bool:
    """Tell whether torch's profiler is on."""
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def raise_priority(output: torch.Tensor, by: int = 1) -> None:
    """Make eager autograd run the node that made `output` as soon as its gradients exist.

    Autograd takes the ready node with the highest sequence number. A gather is the first node of the forward
    pass, so without this its reduce_scatter would wait for the whole backward pass, with every full gradient
    alive. Of ready nodes with raised priority the one raised `by` more runs first. A no-op while tracing, where
    the order is the graph's.
    """
    if not is_tracing() and output.grad_fn is not None:
        output.grad_fn._set_sequence_nr(2**62 + by)  # pyright: ignore[reportAttributeAccessIssue]


def thread_state() -> Callable[[], Any]:
    """Take down what of torch's state is a thread's own, and return a context manager that sets it in another.

    Grad mode, inference mode and autocast; default dtype, threads and random numbers are the process's.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    modes = overrides._get_current_function_mode_stack()  # such as `with torch.device("meta"):`

    @contextmanager
    def inherit() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, dtype, cache in casts:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cache))
            for mode in modes:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            yield

    return inherit


@contextmanager
def quiet_vmap_fallback() -> Iterator[None]:
    """Silence "There is a performance drop because we have not yet implemented the batching rule".

    In a simulation such an operation (a flash attention on a CPU) runs rank by rank, which is what ranks do.
    """
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def register_box(
    cls: type,
    flatten: Callable[[Any], tuple[tuple[Any, ...], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Register a pytree node with torch (for torch.func) and with optree (for third-party optimizers).

    `flatten(box) -> (children, static)`, `unflatten(static, children) -> box`. Both are plain functions:
    Dynamo cannot trace the methods of a class decorator.
    """
    import optree

    pytree.register_pytree_node(
        cls,
        lambda box: (list(flatten(box)[0]), flatten(box)[1]),
        lambda children, static: unflatten(static, children),
        flatten_with_keys_fn=lambda box: (  # pyright: ignore[reportArgumentType]
            [(pytree.SequenceKey(i), c) for i, c in enumerate(flatten(box)[0])],
            flatten(box)[1],
        ),
        serialized_type_name=f"fzero.{cls.__name__}",
    )
    optree.register_pytree_node(cls, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)  # pyright: ignore


# ---------------------------------------------------------------- graphs (fzero.graph)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_FZERO = os.path.dirname(os.path.dirname(__file__)) + os.sep


def user_line() -> str:
    """Say which line outside torch and fzero runs now: "file:line"; "" where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _FZERO, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Lines(TorchDispatchMode):
    """Notes on each traced node the source line that ran it, in `node.meta["custom"]["line"]`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with annotate({"line": user_line()}):
            return func(*args, **(kwargs or {}))


TRACING = threading.RLock()
"""Held while a step is traced: what a trace switches on (modes, flags) is the process's."""


def line_of(node: torch.fx.Node) -> str:
    """Return the source line that a node was traced from, "file:line", or ""."""
    return (node.meta.get("custom") or {}).get("line", "")


def fake_like(tensors: Sequence[torch.Tensor], beside: Any = None) -> list[torch.Tensor]:
    """Make tensors of the same shapes, strides, dtypes and devices that own no memory, for tracing.

    A meta tensor is taken for one on the CPU. Stand-ins of one graph are made `beside` each other.
    """
    devices = ["cpu" if x.device.type == "meta" else x.device for x in tensors]
    with _mode_of([] if beside is None else [beside]):
        alike = zip(tensors, devices, strict=True)
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x, device in alike]


def _mode_of(fakes: Sequence[torch.Tensor]) -> FakeTensorMode:
    found = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    return FakeTensorMode(allow_non_fake_inputs=True) if found is None else found


@contextmanager
def _compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true, as torch.export does: models ask it before they read values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class DataDependentError(RuntimeError):
    """Traced code needed the value of a tensor; `line` is where."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


def _line_of_traceback(error: BaseException) -> str:
    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if not line.startswith((_TORCH, _FZERO, "<"))), "")


def trace(f: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Record what `f(*fakes)` runs, a flat list of tensors to a flat list, as a graph of aten operations.

    make_fx, not Dynamo: it records what really ran, through every transform of torch.func and every
    autograd.Function (Dynamo can lose a Function's backward, pytorch#193279), and traces any Python.

    Raises:
        DataDependentError: if `f` reads the value of a tensor.
    """

    def with_lines(*xs: torch.Tensor) -> Any:
        with _Lines():
            return f(*xs)

    try:
        # within the stand-ins' mode, so that nothing is computed and no random number drawn
        with preserve_node_meta(), _compiling(), _mode_of(fakes):
            return make_fx(with_lines, _allow_non_fake_inputs=True)(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise DataDependentError(str(error.func), _line_of_traceback(error)) from error
    except RuntimeError as error:
        if "value out of a tracing tensor" in str(error):
            raise DataDependentError("a tensor's value", _line_of_traceback(error)) from error
        raise


def recorded() -> list[torch.fx.Node]:
    """List the operations that the trace that runs now has recorded."""
    mode: Any = get_proxy_mode()
    return [] if mode is None else list(mode.tracer.graph.nodes)


def functional(gm: torch.fx.GraphModule, fakes: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Trace a graph again with every in-place operation replaced by one that makes a new value."""
    run = torch.func.functionalize(torch.fx.Interpreter(gm).run, remove="mutations")
    with preserve_node_meta(), torch.no_grad(), _mode_of(fakes):
        return make_fx(run, _allow_non_fake_inputs=True)(*fakes)


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share memory."""
    return x.untyped_storage()._cdata


def inductor(gm: torch.fx.GraphModule, fakes: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a flat graph with Inductor, keeping the order of its nodes and the strides of its results.

    Its operations are taken apart only now: what was planned is whole ones, which Inductor fuses again.

    Returns:
        A function of a list of tensors, which it empties, so that arguments die as they are consumed.
    """
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config

    importlib.import_module("torch._inductor.lowering")  # max_pool2d's decomposition takes it for loaded
    order = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    with torch.no_grad(), _mode_of(fakes):
        apart = make_fx(torch.fx.Interpreter(gm).run, select_decomp_table(), _allow_non_fake_inputs=True)(*fakes)
    output = next(n for n in apart.graph.nodes if n.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with config.patch(order), torch.no_grad():
        return compile_fx.compile_fx_inner(apart, list(fakes), is_inference=True)  # pyright: ignore
