"""Private torch APIs of Inductor: a flat graph compiled, for one length or for all, in this process or another.

Inductor takes seconds to import, so each function imports what it needs of it.
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

from fzero._torch.tracing import fake_like

__all__ = [
    "Form",
    "compile_threads",
    "have_equal_strides",
    "importing",
    "inductor",
    "inductor_folder",
    "inductor_for_lengths",
    "pickled",
    "preparing",
    "unpickled",
]

# The key of the cache is a pickle. Of a memory format it holds the first module that has imported torch, which is
# another one in a worker: so say that it is torch.
copyreg.pickle(torch.memory_format, lambda x: (_memory_format, (str(x).removeprefix("torch."),)))  # pyright: ignore


# Inductor's process: what it loads, and what another process needs to compile the same graph into the same cache.


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


@functools.cache
def preparing() -> threading.Thread:
    """Start to find out which vector instructions code may have: Inductor compiles and loads a library to see.

    That takes seconds in which Python has other things to do, such as to trace.
    """
    return _beside(_prepare)


def _prepare() -> None:
    with suppress(Exception):  # Inductor meets the error itself, if it needs to know
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


@functools.cache
def importing() -> threading.Thread:
    """Start to import Inductor and to prepare it, which takes 10 s on a machine that has other things to do."""
    return _beside(_import)


def _beside(work: Callable[[], None]) -> threading.Thread:
    """Start a thread that imports Inductor.

    Dynamo is imported first, which a trace needs in any case: Dynamo and Inductor import each other. If two threads
    begin at the two ends, Python gives one of them a module that is half done.
    """
    importlib.import_module("torch._dynamo")
    thread = threading.Thread(target=work, daemon=True)
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

    with _without_warnings_of_settings():
        how = (config.save_config(), _settings())
    described = [(_lines(graph), _forms(fakes), _forms(made)) for graph, fakes, made in graphs]
    return pickle.dumps((how, described))


def unpickled(data: bytes) -> list[Callable[[], Described]]:
    """Set this process up as the one that wrote graphs down, and return functions that make them.

    A graph with an operation of the user's own, which is not registered here, raises when it is made.
    """
    from torch._inductor import config

    (inductors, settings), described = pickle.loads(data)
    with _without_warnings_of_settings():
        config.load_config(inductors)
    _set(settings)

    def make(lines: list[_Line], *forms: Any) -> Described:
        with FakeTensorMode():
            fakes, made = [[torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) for x in xs] for xs in forms]
        return _graph(lines), fakes, made

    return [functools.partial(make, *one) for one in described]


@contextmanager
def _without_warnings_of_settings() -> Iterator[None]:
    """Silence torch 2.15, which warns of its own deprecated settings where all of them are copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


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


# Inductor: a flat graph compiled, for one length of what it is given or for all.
#
# Inductor takes seconds to import, so each function imports what it needs of it.


Form = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]  # a tensor's shape, strides, dtype and device


def inductor(
    gm: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], made: Sequence[Any]
) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a flat graph with Inductor, keeping the order of its nodes and the strides of its results.

    Its operations are taken apart only now: what was planned is whole ones, which Inductor fuses again. What an
    operation is made of may lay its result out in another way than it does itself. So a view is a reshape here, and a
    result is copied where its strides are not those that were traced.

    Args:
        gm: the graph.
        fakes: stand-ins of its arguments.
        made: stand-ins of its results.

    Returns:
        A function of a list of tensors, which it empties, so that arguments die as they are consumed.
    """
    mode = _mode()
    given = [fake_like([x], mode=mode)[0] for x in fakes]  # each alone, wherever it lies
    return _compiled(lambda *args: _laid_out(_Reshaping(gm).run(*args), made), given, mode)


def inductor_for_lengths(
    gm: torch.fx.GraphModule,
    arguments: Callable[[Any], Mapping[str, tuple[Any, Any]]],
    forms: Callable[[Any], tuple[Sequence[Form], Sequence[Form]]],
    length: int,
) -> tuple[Callable[[list[Any]], Any], Callable[[int], bool]]:
    """Compile a flat graph once for all lengths of what it is given.

    Args:
        gm: the graph, as it was traced at one length.
        arguments: of a length, to the arguments of each node by its name.
        forms: of a length, to the forms of the graph's arguments and of its results.
        length: at which it was traced.

    Returns:
        A function of a list of the length and the tensors, and one that says whether it holds for a length. Inductor
        may have assumed, say, that a number divides by 16.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    mode = _mode()
    env: Any = mode.shape_env
    source = ConstantSource("length")
    symbol = env.create_symbol(length, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=length, source=source)

    def stand_ins(forms: Sequence[Form]) -> list[torch.Tensor]:
        with mode:
            return [torch.empty_strided(*x[:2], dtype=x[2], device=x[3]) for x in forms]

    def run(size: Any, *args: torch.Tensor) -> tuple[Any, ...]:
        return _laid_out(_AtLength(gm, arguments(size)).run(*args), stand_ins(forms(size)[1]))

    runs = _compiled(run, [size, *stand_ins(forms(size)[0])], mode)

    def holds(length: int) -> bool:
        return length in env.var_to_range[symbol] and all(bool(g.expr.subs(symbol, length)) for g in env.guards)

    return runs, holds


def _mode() -> FakeTensorMode:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # without a ShapeEnv nothing is cached


def _compiled(run: Callable[..., tuple[Any, ...]], given: Sequence[Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Take a function apart on stand-ins, and compile what it is made of.

    Inductor may write what is no C++: it declares a result twice where one loop sums halves for two results. Then it
    puts less into one loop.
    """
    from torch._inductor.exc import CppCompileError, InductorError

    preparing().join()
    importlib.import_module("torch._inductor.lowering")  # max_pool2d's decomposition takes it for loaded
    settings = {"reorder_for_peak_memory": False, "reorder_for_locality": False, **_right_code()}
    try:
        return _compiled_with(settings, run, given, mode)
    except (CppCompileError, InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", error), CppCompileError):
            raise
        return _compiled_with({**settings, "cpp.max_horizontal_fusion_size": 1}, run, given, mode)


def _compiled_with(
    settings: dict[str, Any], run: Callable[..., tuple[Any, ...]], given: Sequence[Any], mode: FakeTensorMode
) -> Callable[..., Any]:
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad(), mode:
        apart = make_fx(run, select_decomp_table(), _allow_non_fake_inputs=True)(*given)
    output = next(n for n in apart.graph.nodes if n.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with config.patch(settings), torch.no_grad(), tracing(TracingContext(mode)):
        return compile_fx.compile_fx_inner(apart, given, is_inference=True)  # pyright: ignore


def _right_code() -> dict[str, str]:
    """Return settings of Inductor with which GCC makes right code.

    GCC 11 and 12 write wrong numbers at -O3 with AVX-512 if one file transposes two tiles of 32 by 32 halves. Their SLP
    vectorizer, which merges scalar operations, is at fault; torch.compile has the fault, too. Inductor's code is
    vectorized already, so it loses nothing without that step. Inductor takes compiler flags in no other place.
    """
    from torch._inductor import config

    flag = "enable_floating_point_contract_flag"  # ends in a flag of the compiler, and so may hold two
    return {f"cpp.{flag}": f"{getattr(config.cpp, flag)} -fno-tree-slp-vectorize"}


class _Reshaping(torch.fx.Interpreter):
    """Runs a graph with reshapes for its views: what they are taken of may lie otherwise than when it was traced."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(torch.ops.aten.reshape.default if target in _VIEWS else target, args, kwargs)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _AtLength(_Reshaping):
    """Runs a graph with other arguments of its nodes than those that were traced."""

    def __init__(self, gm: torch.fx.GraphModule, arguments: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(gm)
        self.arguments = arguments

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = self.arguments.get(n.name, (n.args, n.kwargs))
        return self.map_nodes_to_values(args, n), self.map_nodes_to_values(kwargs, n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        pads = target is torch.ops.aten.constant_pad_nd.default
        return padded(*args, **kwargs) if pads else super().call_function(target, args, kwargs)


def padded(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    """Pad as `constant_pad_nd` does, whose own kernel asks for sizes as numbers, which fixes a length."""
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


def _laid_out(results: Sequence[Any], made: Sequence[Any]) -> tuple[Any, ...]:
    """Give results the strides of their stand-ins."""
    return tuple([_with_strides_of(like, x) for x, like in zip(results, made, strict=True)])


def _with_strides_of(like: Any, x: Any) -> Any:
    """Copy a tensor if its strides are others than a dense stand-in's, dimensions of one element aside."""
    if not isinstance(like, torch.Tensor) or have_equal_strides(x, like):
        return x
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    back = sorted(range(like.dim()), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def have_equal_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape lie alike; strides that no second element needs do not count."""
    return not x.numel() or all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))
