"""Inductor's process: what it loads, and what another process needs to compile the same graph into the same cache.

Inductor takes seconds to import, so each function imports what it needs of it.
"""

import copyreg
import functools
import importlib
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

# The key of the cache is a pickle. Of a memory format it holds the first module that has imported torch, which is
# another one in a worker: so say that it is torch.
copyreg.pickle(torch.memory_format, lambda x: (_memory_format, (str(x).removeprefix("torch."),)))  # pyright: ignore

__all__ = ["compile_threads", "importing", "inductor_folder", "pickled", "preparing", "unpickled"]


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


@functools.cache
def preparing() -> threading.Thread:
    """Start to find out which vector instructions code may have: Inductor compiles and loads a library to see.

    That takes seconds in which Python has other things to do, such as to trace.
    """
    thread = threading.Thread(target=_prepare, daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    with suppress(Exception):  # Inductor meets the error itself, if it needs to know
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


@functools.cache
def importing() -> threading.Thread:
    """Start to import Inductor and to prepare it, which takes 10 s on a machine that has other things to do."""
    thread = threading.Thread(target=_import, daemon=True)
    thread.start()
    return thread


def _import() -> None:
    with suppress(Exception):  # whoever uses Inductor meets the error
        for name in ("compile_fx", "lowering"):
            importlib.import_module(f"torch._inductor.{name}")
        preparing().join()


def inductor_folder() -> Path:
    """Return a folder for what fzero notes of what Inductor keeps in its cache, for this torch and so many threads.

    Raises:
        OSError: if there is no cache.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "fzero", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def compile_threads() -> int:
    """Return how many compilations the user lets Inductor run at once (TORCHINDUCTOR_COMPILE_THREADS)."""
    from torch._inductor import config

    return config.compile_threads or 1


Described = tuple[Graph, Sequence[torch.Tensor], Sequence[Any]]  # a graph, stand-ins of its arguments and its results


def pickled(graphs: Sequence[Described]) -> bytes:
    """Write graphs and the shapes of their arguments and results down for another process, and how this one compiles.

    Raises:
        Exception: whatever pickle raises of what it cannot write: a setting of the user's, a constant in a graph.
    """
    from torch._inductor import config

    how = (config.save_config(), _settings())
    described = [(_lines(graph), _forms(fakes), _forms(made)) for graph, fakes, made in graphs]
    return pickle.dumps((how, described))


def unpickled(data: bytes) -> list[Callable[[], Described]]:
    """Set this process up as the one that wrote graphs down, and return functions that make them.

    A graph with an operation of the user's own, which is not registered here, raises when it is made.
    """
    from torch._inductor import config

    (inductors, settings), described = pickle.loads(data)
    config.load_config(inductors)
    _set(settings)

    def make(lines: list[_Line], *forms: Any) -> Described:
        with FakeTensorMode():
            fakes, made = [[torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) for x in xs] for xs in forms]
        return _graph(lines), fakes, made

    return [functools.partial(make, *one) for one in described]


def _forms(fakes: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in fakes]


class _Settings(NamedTuple):
    """What the key of the cache holds of torch's settings."""

    threads: int
    dtype: torch.dtype
    matmul: dict[str, Any]
    deterministic: bool
    warns: bool


_MATMUL = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def _settings() -> _Settings:
    return _Settings(
        torch.get_num_threads(),
        torch.get_default_dtype(),
        {name: getattr(torch.backends.cuda.matmul, name) for name in _MATMUL},
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set(settings: _Settings) -> None:
    torch.set_num_threads(settings.threads)
    torch.set_default_dtype(settings.dtype)
    for name, value in settings.matmul.items():
        setattr(torch.backends.cuda.matmul, name, value)
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=settings.warns)


class _Line(NamedTuple):
    """A node without its graph: its function by name if torch registers it, and other nodes by their numbers."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


class _NodeNumber(NamedTuple):
    number: int


def _lines(graph: Graph) -> list[_Line]:
    number = {n: _NodeNumber(i) for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> _Line:
        target = ("torch.ops", *str(n.target).split(".")) if isinstance(n.target, OpOverload) else n.target
        args, kwargs = map_arg((n.args, n.kwargs), number.__getitem__)  # pyright: ignore
        return _Line(n.op, n.name, target, args, kwargs)

    return [line(n) for n in graph.nodes]


def _graph(lines: Sequence[_Line]) -> Graph:
    graph, nodes = Graph(), list[Node]()

    def node(x: Any) -> Any:
        return nodes[x.number] if isinstance(x, _NodeNumber) else x

    for line in lines:
        named = isinstance(line.target, tuple)
        target: Any = functools.reduce(getattr, line.target[1:], torch.ops) if named else line.target
        args, kwargs = tree_map(node, (line.args, line.kwargs), is_leaf=lambda x: isinstance(x, _NodeNumber))
        nodes.append(graph.create_node(line.op, target, args, kwargs, line.name))
    return graph
