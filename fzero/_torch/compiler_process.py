"""Private torch APIs of Inductor's process: the modules that it loads, and what another process fills its cache with.

Importing Inductor takes seconds, so each function imports its own part of it.
"""

import functools
import importlib
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

__all__ = [
    "TensorMetadata",
    "compile_threads",
    "empty_like",
    "inductor_folder",
    "memory_format",
    "pickle_graphs",
    "start_cpu_probe",
    "start_import",
    "unpickle_graphs",
]


def memory_format(name: str) -> torch.memory_format:
    """Return torch's memory format of this name. A pickled graph has the name, since the object cannot be pickled."""
    return getattr(torch, name)


@functools.cache
def start_cpu_probe() -> threading.Thread:
    """Start a thread that detects the CPU's vector instructions, for which Inductor compiles and loads libraries.

    That takes seconds, in which Python can do other work, such as tracing. On a processor with AMX there are four
    libraries, each loaded by a new process that imports torch. So code for a GPU does not wait for it.
    """
    return _start_thread(_probe_cpu)


def _probe_cpu() -> None:
    with suppress(Exception):  # Inductor will raise the error itself when it needs the result
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


@functools.cache
def start_import() -> threading.Thread:
    """Start a thread that imports Inductor and starts its compile processes, which takes 10 s on a busy machine."""
    return _start_thread(_import_inductor)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread that imports Inductor.

    Dynamo, which a trace needs in any case, is imported first. Dynamo and Inductor import each other. If one thread
    imports Dynamo while another imports Inductor, Python may give one of them a partly initialized module.
    """
    importlib.import_module("torch._dynamo")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _import_inductor() -> None:
    with suppress(Exception):  # the first use of Inductor will raise the error again
        for name in ("compile_fx", "lowering"):
            importlib.import_module(f"torch._inductor.{name}")


def inductor_folder() -> Path:
    """Return the folder of fzero's notes on Inductor's cache, for this version of torch and number of threads.

    Raises:
        OSError: if the cache has no folder.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), "fzero", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def compile_threads() -> int:
    """Return the number of compilations that Inductor may run at once (TORCHINDUCTOR_COMPILE_THREADS)."""
    from torch._inductor import config

    return config.compile_threads or 1


TensorMetadata = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]  # shape, strides, dtype and device
_GraphWithStandIns = tuple[Graph, Sequence[torch.Tensor], Sequence[Any]]  # a graph, stand-ins of arguments and results


def pickle_graphs(graphs: Sequence[_GraphWithStandIns]) -> bytes:
    """Pickle graphs, the shapes of their arguments and results, and this process's settings, for another process.

    Raises:
        Exception: any error of pickle, for a setting of the user or a constant in a graph.
    """
    from torch._inductor import config

    with _without_setting_warnings():
        settings = (config.save_config(), _read_settings())
    rows = [
        (_graph_lines(graph), _tensor_metadata(stand_ins), _tensor_metadata(results))
        for graph, stand_ins, results in graphs
    ]
    return pickle.dumps((settings, rows))


def unpickle_graphs(data: bytes) -> list[Callable[[], _GraphWithStandIns]]:
    """Apply the settings of the process that pickled graphs, and return functions that build the graphs.

    A function raises if its graph has a custom operation that is not registered in this process.
    """
    from torch._inductor import config

    (inductor_config, settings), rows = pickle.loads(data)
    with _without_setting_warnings():
        config.load_config(inductor_config)
    _apply_settings(settings)

    def make(lines: list[_Line], stand_ins: Any, results: Any) -> _GraphWithStandIns:
        with FakeTensorMode():
            tensors = empty_like(stand_ins), empty_like(results)
        return _build_graph(lines), *tensors

    return [functools.partial(make, *row) for row in rows]


@contextmanager
def _without_setting_warnings() -> Iterator[None]:
    """Silence torch 2.15, which warns of its own deprecated settings where all of them are copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _tensor_metadata(stand_ins: Sequence[torch.Tensor]) -> list[TensorMetadata]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in stand_ins]


def empty_like(metadata: Sequence[TensorMetadata]) -> list[torch.Tensor]:
    """Make tensors of these shapes, strides, dtypes and devices, with any values: what code is compiled for."""
    return [torch.empty_strided(x[0], x[1], dtype=x[2], device=x[3]) for x in metadata]


class _Settings(NamedTuple):
    """The settings of torch that are part of the cache's key."""

    threads: int
    dtype: torch.dtype
    matmul: dict[str, Any]
    deterministic: bool
    warns: bool


_MATMUL = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def _read_settings() -> _Settings:
    return _Settings(
        threads=torch.get_num_threads(),
        dtype=torch.get_default_dtype(),
        matmul={name: getattr(torch.backends.cuda.matmul, name) for name in _MATMUL},
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warns=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _apply_settings(settings: _Settings) -> None:
    torch.set_num_threads(settings.threads)
    torch.set_default_dtype(settings.dtype)
    for name, value in settings.matmul.items():
        setattr(torch.backends.cuda.matmul, name, value)
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=settings.warns)


class _Line(NamedTuple):
    """A node without its graph. An operation of torch is stored by name, and other nodes by their indices."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


class _NodeIndex(NamedTuple):
    index: int


def _graph_lines(graph: Graph) -> list[_Line]:
    indices = {n: _NodeIndex(i) for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> _Line:
        target = ("torch.ops", *str(n.target).split(".")) if isinstance(n.target, OpOverload) else n.target
        args, kwargs = map_arg((n.args, n.kwargs), indices.__getitem__)  # pyright: ignore
        return _Line(op=n.op, name=n.name, target=target, args=args, kwargs=kwargs)

    return [line(n) for n in graph.nodes]


def _build_graph(lines: Sequence[_Line]) -> Graph:
    """Build a graph of the lines that a worker gets, since a graph itself cannot be pickled."""
    graph = Graph()
    nodes = list[Node]()

    def node(x: Any) -> Any:
        return nodes[x.index] if isinstance(x, _NodeIndex) else x

    for line in lines:
        has_name = isinstance(line.target, tuple)
        target: Any = functools.reduce(getattr, line.target[1:], torch.ops) if has_name else line.target
        args, kwargs = tree_map(node, (line.args, line.kwargs), is_leaf=lambda x: isinstance(x, _NodeIndex))
        nodes.append(graph.create_node(line.op, target, args, kwargs, line.name))
    return graph
