"""Private torch APIs of Inductor: compile a flat graph, for one length or for all, in this process or another.

Importing Inductor takes seconds, so each function imports its own part of it.
"""

import copyreg
import functools
import importlib
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from fzero._torch.tracing import stand_ins_like

__all__ = [
    "TensorMetadata",
    "compile_threads",
    "have_equal_strides",
    "inductor",
    "inductor_folder",
    "inductor_for_lengths",
    "pad_constant",
    "pickle_graphs",
    "start_cpu_probe",
    "start_import",
    "unpickle_graphs",
]

# The cache's key is a pickle. By default the pickle of a memory format names the first module that imported torch,
# which differs in a worker. Here it always names torch.
copyreg.pickle(torch.memory_format, lambda x: (_memory_format, (str(x).removeprefix("torch."),)))  # pyright: ignore


# Inductor's process: the modules that it loads, and the data with which another process fills the same cache.


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


@functools.cache
def start_cpu_probe() -> threading.Thread:
    """Start a thread that detects the CPU's vector instructions, for which Inductor compiles and loads libraries.

    That takes seconds, in which Python can do other work, such as tracing. On a processor with AMX there are four
    libraries, each loaded by a new process that imports torch. So code for a GPU does not wait for it.
    """
    return _start_thread(_prepare)


def _prepare() -> None:
    with suppress(Exception):  # Inductor will raise the error itself when it needs the result
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


@functools.cache
def start_import() -> threading.Thread:
    """Start a thread that imports Inductor and starts its compile processes, which takes 10 s on a busy machine."""
    return _start_thread(_import)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread that imports Inductor.

    Dynamo, which a trace needs in any case, is imported first. Dynamo and Inductor import each other. If one thread
    imports Dynamo while another imports Inductor, Python may give one of them a partly initialized module.
    """
    importlib.import_module("torch._dynamo")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _import() -> None:
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

    with _without_warnings_of_settings():
        settings = (config.save_config(), _read_settings())
    rows = [(_lines(graph), _metadata_of(stand_ins), _metadata_of(results)) for graph, stand_ins, results in graphs]
    return pickle.dumps((settings, rows))


def unpickle_graphs(data: bytes) -> list[Callable[[], _GraphWithStandIns]]:
    """Apply the settings of the process that pickled graphs, and return functions that build the graphs.

    A function raises if its graph has a custom operation that is not registered in this process.
    """
    from torch._inductor import config

    (inductor_config, settings), rows = pickle.loads(data)
    with _without_warnings_of_settings():
        config.load_config(inductor_config)
    _apply_settings(settings)

    def make(lines: list[_Line], stand_ins: Any, results: Any) -> _GraphWithStandIns:
        with FakeTensorMode():
            tensors = _empty_like(stand_ins), _empty_like(results)
        return _build_graph(lines), *tensors

    return [functools.partial(make, *row) for row in rows]


@contextmanager
def _without_warnings_of_settings() -> Iterator[None]:
    """Silence torch 2.15, which warns of its own deprecated settings where all of them are copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _metadata_of(stand_ins: Sequence[torch.Tensor]) -> list[TensorMetadata]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in stand_ins]


def _empty_like(metadata: Sequence[TensorMetadata]) -> list[torch.Tensor]:
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


def _lines(graph: Graph) -> list[_Line]:
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


# Compile a flat graph with Inductor, for one length of its arguments or for all lengths.


def inductor(
    gm: torch.fx.GraphModule, stand_ins: Sequence[torch.Tensor], results: Sequence[Any]
) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a flat graph with Inductor, keeping the order of its nodes and the strides of its results.

    The graph's operations are decomposed only now, since plans are made of whole operations, and Inductor fuses the
    parts again. A decomposition may give its result other strides than the operation itself does. So views become
    reshapes, and a result is copied if its strides are not the traced strides.

    Args:
        gm: the graph.
        stand_ins: stand-ins of its arguments.
        results: stand-ins of its results.

    Returns:
        A function of a list of tensors. It empties the list, so that arguments are freed as they are consumed.
    """
    mode = _mode()
    args = [stand_ins_like([x], mode=mode)[0] for x in stand_ins]  # one by one: arguments share no buffer
    return _compile(lambda *xs: _with_strides(_Reshaping(gm).run(*xs), results), args, mode)


def inductor_for_lengths(
    gm: torch.fx.GraphModule,
    arguments: Callable[[Any], Mapping[str, tuple[Any, Any]]],
    metadata: Callable[[Any], tuple[Sequence[TensorMetadata], Sequence[TensorMetadata]]],
    length: int,
) -> tuple[Callable[[list[Any]], Any], Callable[[int], bool]]:
    """Compile a flat graph once for all lengths of its arguments.

    Args:
        gm: the graph, traced at one length.
        arguments: maps a length to the arguments of each node, by the node's name.
        metadata: maps a length to the metadata of the graph's arguments and of its results.
        length: the traced length.

    Returns:
        A function of a list of the length and the tensors, and a function that returns whether the code is valid for a
        length. Inductor may have assumed, for instance, that a size is a multiple of 16.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    mode = _mode()
    env: Any = mode.shape_env
    source = ConstantSource("length")
    symbol = env.create_symbol(length, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=length, source=source)

    def run(size: Any, *args: torch.Tensor) -> tuple[Any, ...]:
        with mode:
            results = _empty_like(metadata(size)[1])
        return _with_strides(_AtLength(gm, arguments(size)).run(*args), results)

    with mode:
        stand_ins = _empty_like(metadata(size)[0])
    runs = _compile(run, [size, *stand_ins], mode)

    def holds(length: int) -> bool:
        return length in env.var_to_range[symbol] and all(bool(g.expr.subs(symbol, length)) for g in env.guards)

    return runs, holds


def _mode() -> FakeTensorMode:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # without a ShapeEnv nothing is cached


def _compile(run: Callable[..., tuple[Any, ...]], args: Sequence[Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Decompose a function's operations by running it on stand-ins, and compile them.

    Inductor may write invalid C++: it declares a result twice where one loop sums half-precision values for two
    results. Then the code is compiled again with less fusion.
    """
    from torch._inductor.exc import CppCompileError, InductorError

    if all(x.device.type == "cpu" for x in args if isinstance(x, torch.Tensor)):
        start_cpu_probe().join()
    importlib.import_module("torch._inductor.lowering")  # max_pool2d's decomposition assumes that it is loaded
    settings = {"reorder_for_peak_memory": False, "reorder_for_locality": False, **_gcc_workaround()}
    try:
        return _compile_with(settings, run, args, mode)
    except (CppCompileError, InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", error), CppCompileError):
            raise
        return _compile_with({**settings, "cpp.max_horizontal_fusion_size": 1}, run, args, mode)


def _compile_with(
    settings: dict[str, Any], run: Callable[..., tuple[Any, ...]], args: Sequence[Any], mode: FakeTensorMode
) -> Callable[..., Any]:
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad(), mode:
        decomposed = make_fx(run, select_decomp_table(), _allow_non_fake_inputs=True)(*args)
    output = next(n for n in decomposed.graph.nodes if n.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with config.patch(settings), torch.no_grad(), tracing(TracingContext(mode)):
        return compile_fx.compile_fx_inner(decomposed, args, is_inference=True)  # pyright: ignore


def _gcc_workaround() -> dict[str, str]:
    """Return settings of Inductor with which GCC compiles correct code.

    GCC 11 and 12 compute wrong numbers at -O3 with AVX-512 if one file transposes two tiles of 32 x 32 half-precision
    values. Their SLP vectorizer, which merges scalar operations into vectors, is at fault; torch.compile has this bug,
    too. Inductor's code is vectorized already, so it loses nothing without the SLP vectorizer. Inductor accepts
    compiler flags in no other setting.
    """
    from torch._inductor import config

    flag = "enable_floating_point_contract_flag"  # its value becomes part of the command line, so it may hold two flags
    return {f"cpp.{flag}": f"{getattr(config.cpp, flag)} -fno-tree-slp-vectorize"}


class _Reshaping(torch.fx.Interpreter):
    """Runs a graph with reshapes in place of views, since the viewed tensors may not have the traced strides."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(torch.ops.aten.reshape.default if target in _VIEWS else target, args, kwargs)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _AtLength(_Reshaping):
    """Runs a graph with the arguments of its nodes at another length than the traced length."""

    def __init__(self, gm: torch.fx.GraphModule, arguments: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(gm)
        self.arguments = arguments

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = self.arguments.get(n.name, (n.args, n.kwargs))
        return self.map_nodes_to_values(args, n), self.map_nodes_to_values(kwargs, n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        is_pad = target is torch.ops.aten.constant_pad_nd.default
        return pad_constant(*args, **kwargs) if is_pad else super().call_function(target, args, kwargs)


def pad_constant(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    """Pad as `constant_pad_nd` does. The kernel of `constant_pad_nd` reads sizes as numbers, which fixes the length."""
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        parts = [x]
        for side, n in enumerate(pad[2 * i : 2 * i + 2]):
            if n < 0:
                size = parts[0].shape[dim] + n
                parts = [parts[0].narrow(dim, 0 if side else -n, size)]
        for side, n in enumerate(pad[2 * i : 2 * i + 2]):
            if n > 0:
                full = x.new_full([n if d == dim else s for d, s in enumerate(x.shape)], value)
                parts = [*parts, full] if side else [full, *parts]
        x = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return x


def _with_strides(results: Sequence[Any], stand_ins: Sequence[Any]) -> tuple[Any, ...]:
    """Return results with the strides of their stand-ins."""
    return tuple([_with_strides_of(like, x) for x, like in zip(results, stand_ins, strict=True)])


def _with_strides_of(like: Any, x: Any) -> Any:
    """Return `x` with the strides of a dense stand-in: a copy if its strides differ where they matter."""
    if not isinstance(like, torch.Tensor) or have_equal_strides(x, like):
        return x
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    inverse = sorted(range(like.dim()), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def have_equal_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal strides, except in dimensions of size 1."""
    return not x.numel() or all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))
