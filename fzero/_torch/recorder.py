"""Private torch APIs that record each operation of a step as a node of a graph, with its source line.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_recorder.py` shows which.
"""

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,  # pyright: ignore[reportPrivateUsage]
    disable_proxy_modes_tracing,
    get_proxy_mode,
)
from torch.fx.traceback import annotate, get_current_meta
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from fzero._torch.memory import storage_id
from fzero._torch.running_transforms import is_deciding
from fzero._torch.stand_ins import StandInCache, make_alias

__all__ = ["DEVICE_OF", "REPLACEMENTS", "OneNode", "Recorder", "Stacks", "is_fzero_code", "is_user_code", "user_line"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules", "")
_TRACING = os.path.join(os.path.dirname(__file__), "tracing.py"), "with_lines"  # where a trace begins
_FZERO = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGES = tuple([os.path.join(_PYTHON, name) for name in ("site-packages", "dist-packages")])
_EINOPS = os.path.join("", "einops", "")
DEVICE_OF = torch.ops.prim.device.default
# under vmap forward mode makes its zeros on the meta device, where stand-ins are not
REPLACEMENTS: dict[Any, Any] = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}


@functools.cache  # each recorded operation asks for the files of its frames
def is_user_code(file: str) -> bool:
    """Return whether a file is code of the user: not of torch, fzero, einops or Python itself, and not generated."""
    is_library = (file.startswith(_PYTHON) and not file.startswith(_PACKAGES)) or _EINOPS in file
    return not is_library and not file.startswith((_TORCH, _FZERO, "<"))


def is_fzero_code(file: str) -> bool:
    """Return whether a file belongs to fzero."""
    return file.startswith(_FZERO)


def user_line() -> str:
    """Return the running line outside of torch and fzero, "file:line", or "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Stacks:
    """The functions and modules that operations run in, between the start of a step and the operation.

    A module is named as within its parent, "layers.3", and the outermost module by its class. A function has its own
    name. fzero's and torch's own functions are left out, but not torch's modules.
    """

    def __init__(self, file: str, function: str) -> None:
        """Begin each stack after the innermost frame of a function of a file."""
        self.start = file, function
        self._names: dict[tuple[int, int], str] = {}  # of modules within their parents

    def current(self) -> tuple[str, ...]:
        """Return the stack of the running operation, the outermost function first."""
        frame: FrameType | None = sys._getframe(1)
        calls: list[str | torch.nn.Module] = []
        while frame is not None:
            code = frame.f_code
            if (code.co_filename, code.co_name) == self.start:
                break
            is_layer = code.co_name == "forward" and code.co_filename.startswith(_MODULES)
            if is_layer or is_user_code(code.co_filename):
                call = _find_module(frame) or code.co_qualname.rpartition("<locals>.")[2]
                if isinstance(call, torch.nn.Module) or not call.endswith(">"):  # no lambdas and comprehensions
                    calls.append(call)
            frame = frame.f_back
        return tuple(self._call_names(calls[::-1]))

    def _call_names(self, calls: Sequence[str | torch.nn.Module]) -> Iterator[str]:
        """Yield the names of calls. A module's own functions, and decorators around it, count as the module."""
        parent: torch.nn.Module | None = None
        for call in calls:
            if isinstance(call, str):
                yield call
            elif call is not parent:
                yield self._name_within(parent, call)
                parent = call

    def _name_within(self, parent: torch.nn.Module | None, module: torch.nn.Module) -> str:
        key = id(parent), id(module)
        if key not in self._names:
            names = [] if parent is None else [name for name, child in parent.named_modules() if child is module]
            self._names[key] = names[0] if names else type(module).__name__
        return self._names[key]


def _find_module(frame: FrameType) -> torch.nn.Module | None:
    """Return the module whose method a frame runs, if any."""
    if frame.f_code.co_varnames[:1] != ("self",):
        return None
    first = frame.f_locals.get("self")
    return first if isinstance(first, torch.nn.Module) else None


def _call_source(sources: dict[int, tuple[str, tuple[str, ...]]], stacks: Stacks) -> dict[str, Any]:
    """Return the source line and the stack of the running operation, and whether autograd's engine runs it.

    An operation of the backward pass has the line and the stack of its forward operation.

    Args:
        sources: the lines and stacks of a trace. The key is the sequence number of autograd's newest node when an
            operation ran. An operation of the forward pass is added.
        stacks: finds the stack.
    """
    if torch._C._current_graph_task_id() == -1:
        line, stack = user_line(), stacks.current()
        sources[torch.autograd._get_sequence_nr() - 1] = line, stack  # pyright: ignore[reportPrivateImportUsage]
        return {"line": line, "stack": stack, "backward": False}
    node = torch._C._current_autograd_node()
    line, stack = ("", ()) if node is None else sources.get(node._sequence_nr(), ("", ()))
    return {"line": line or user_line(), "stack": stack, "backward": True}


class Recorder(TorchDispatchMode):
    """Records each operation of a trace, with its source line and its stack in `node.meta["custom"]`.

    It runs before make_fx, and records plain operations on stand-ins itself, in a third of the time. Such operations
    have no symbolic sizes, constants or decompositions to search for. make_fx records all other operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.stacks = Stacks(*_TRACING)
        self.stand_ins = StandInCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation: a plain one directly, and any other by torch's own tracer, which takes longer."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        func = REPLACEMENTS.get(func, func)
        kwargs = kwargs or {}
        mode: Any = get_proxy_mode()
        if mode is None:  # within the function of a OneNode
            return func(*args, **kwargs)
        if _is_plain(func):
            try:
                nodes = _as_nodes(mode.tracer, args), {name: _as_nodes(mode.tracer, x) for name, x in kwargs.items()}
            except _NotPlainError:
                pass
            else:
                return _record_node(mode.tracer, func, args, kwargs, nodes, recorder=self)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            _forget_constants(mode.tracer, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])
        with annotate(_call_source(self.sources, self.stacks)):
            return func(*args, **kwargs)


class OneNode:
    """A pure function of tensors that a Recorder records as one node, rather than as the operations that it runs.

    In other traces, and where a transform of torch.func tracks its tensors, a call just runs the function. Its results
    are either all new tensors, or all views of its first argument.

    Attributes:
        f: the function.
        on_stand_ins: the function that a Recorder calls instead of `f`; by default `f` itself.
    """

    def __init__(self, f: Callable[..., Any], on_stand_ins: Callable[..., Any] | None = None) -> None:
        self.f, self.on_stand_ins = f, on_stand_ins or f
        self.__name__, self.__qualname__, self.__module__ = f.__name__, f.__qualname__, f.__module__
        self.__doc__ = f.__doc__

    def __call__(self, *args: Any) -> Any:
        """Call the function; a Recorder that tracks its tensors records the call as one node."""
        mode: Any = get_proxy_mode()
        recorder = next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)), None)
        if mode is not None and recorder is not None:
            try:
                nodes = _as_nodes(mode.tracer, args)
            except _NotPlainError:
                return self.f(*args)
            return _record_node(mode.tracer, func=self, args=args, kwargs={}, nodes=(nodes, {}), recorder=recorder)
        if is_deciding() and all(type(x) is FakeTensor for x in tree_leaves(args) if isinstance(x, torch.Tensor)):
            return self.on_stand_ins(*args)
        return self.f(*args)

    def __repr__(self) -> str:
        """Return a name that is the same in all processes."""
        return f"{self.f.__module__}.{self.f.__qualname__}"

    def __reduce__(self) -> str:
        return self.f.__qualname__


class _NotPlainError(Exception):
    """The recorder does not track an argument."""


@functools.cache
def _is_plain(func: Any) -> bool:
    """Return whether an operation has its own kernel, and returns tensors whose shapes follow from shapes alone."""
    if not isinstance(func, OpOverload) or func.namespace == "prim":
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if tags & set(func.tags) or func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return False
    types = {str(r.type) for r in func._schema.returns}
    return "lift" not in func._schema.name and bool(types) and types <= {"Tensor", "List[Tensor]"}


def _as_nodes(tracer: Any, x: Any) -> Any:
    """Return arguments of an operation as arguments of its node: the nodes of tensors, and other values unchanged.

    Raises:
        _NotPlainError: if an argument is not a plain value, such as a number, and no stand-in of this trace.
    """
    if isinstance(x, torch.Tensor):
        tracked = tracer.tensor_tracker.get(x) if type(x) is FakeTensor else None
        if tracked is None or tracked.constant is not None:  # make_fx computes with the values of constants
            raise _NotPlainError
        return tracked.proxy.node
    if type(x) in (tuple, list):
        return type(x)([_as_nodes(tracer, y) for y in x])
    if isinstance(x, torch.Generator):  # make_fx accepts generators since torch 2.13
        name = tracer.get_fresh_qualname("_generator")
        setattr(tracer.root, name, x)
        return tracer.create_node("get_attr", name, (), {})
    if x is None or type(x) in _PLAIN:
        return x
    raise _NotPlainError


def _forget_constants(tracer: Any, args: Sequence[torch.Tensor]) -> None:
    """Forget the values of constants that data is written into, in all views: make_fx does so in one view only."""
    entries = [tracer.tensor_tracker.get(x) for x in args]
    constants = [x.constant for x in entries if x is not None and x.constant is not None]
    if not constants or len(constants) == len(args):
        return
    storages = {storage_id(x) for x in constants}
    for x, entry in list(tracer.tensor_tracker.items()):
        if entry.constant is not None and storage_id(entry.constant) in storages:
            tracer.tensor_tracker[x] = _ProxyTensor(entry.proxy, None)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _record_node(
    tracer: Any, func: OpOverload | OneNode, args: Any, kwargs: Any, nodes: Any, recorder: Recorder
) -> Any:
    """Run an operation or a `OneNode` on stand-ins, and add its node to the graph."""
    with disable_proxy_modes_tracing():
        run = func.on_stand_ins if isinstance(func, OneNode) else func
        out = recorder.stand_ins.call(run, args, kwargs)
    meta = {**get_current_meta().get("custom", {}), **_call_source(recorder.sources, recorder.stacks)}
    node = tracer.graph.create_node("call_function", func, *nodes, name=_node_name(func))
    node.meta["custom"] = meta
    if isinstance(out, torch.Tensor):
        _track(tracer, out, node)
    else:
        node.meta["val"] = type(out)([None if x is None else make_alias(x) for x in out])
        for i, x in enumerate(out):
            if x is not None:
                item = tracer.graph.create_node("call_function", operator.getitem, (node, i), {}, name="getitem")
                item.meta["custom"] = meta
                _track(tracer, x, item)
    return out


def _track(tracer: Any, x: Any, node: Node) -> None:
    node.meta["val"] = make_alias(x)
    tracer.tensor_tracker[x] = _ProxyTensor(Proxy(node, tracer), None)


@functools.cache
def _node_name(func: OpOverload | OneNode) -> str:
    return torch.fx.Graph()._target_to_str((func.overloadpacket if isinstance(func, OpOverload) else func).__name__)
