"""Private torch APIs of Inductor: compile a flat graph, for one length of its arguments or for all lengths.

Importing Inductor takes seconds, so each function imports its own part of it.
"""

import copyreg
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch.compiler_process import TensorMetadata, empty_like, memory_format, start_cpu_probe
from fzero._torch.tracing import stand_ins_like

__all__ = ["have_equal_strides", "inductor", "inductor_for_lengths", "pad_constant"]

# The cache's key is a pickle. By default the pickle of a memory format names the first module that imported torch,
# which differs in a worker. Here it always names torch.
copyreg.pickle(torch.memory_format, lambda x: (memory_format, (str(x).removeprefix("torch."),)))  # pyright: ignore


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
    mode = _stand_in_mode()
    args = [stand_ins_like([x], mode=mode)[0] for x in stand_ins]  # one by one: arguments share no buffer
    return _compile(lambda *xs: _with_strides(_ReshapeInterpreter(gm).run(*xs), results), args, mode)


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

    mode = _stand_in_mode()
    env: Any = mode.shape_env
    source = ConstantSource("length")
    symbol = env.create_symbol(length, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=length, source=source)

    def run(size: Any, *args: torch.Tensor) -> tuple[Any, ...]:
        with mode:
            results = empty_like(metadata(size)[1])
        return _with_strides(_AtLength(gm, arguments(size)).run(*args), results)

    with mode:
        stand_ins = empty_like(metadata(size)[0])
    runs = _compile(run, [size, *stand_ins], mode)

    def holds(length: int) -> bool:
        return length in env.var_to_range[symbol] and all(bool(g.expr.subs(symbol, length)) for g in env.guards)

    return runs, holds


def _stand_in_mode() -> FakeTensorMode:
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
    settings = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    try:
        return _compile_with(settings, run, args, mode)
    except (CppCompileError, InductorError) as error:
        if not isinstance(getattr(error, "inner_exception", error), CppCompileError):
            raise
        return _compile_with({**settings, "cpp.max_horizontal_fusion_size": 1}, run, args, mode)


def _compile_with(
    settings: dict[str, Any], run: Callable[..., tuple[Any, ...]], args: Sequence[Any], mode: FakeTensorMode
) -> Callable[..., Any]:
    """Decompose a function's operations and compile them, with these settings of Inductor."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad(), mode:
        decomposed_graph = make_fx(run, select_decomp_table(), _allow_non_fake_inputs=True)(*args)
    output = next(n for n in decomposed_graph.graph.nodes if n.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with (
        config.patch({**settings, **_gcc_workaround(decomposed_graph.graph)}),
        torch.no_grad(),
        tracing(TracingContext(mode)),
    ):
        return compile_fx.compile_fx_inner(decomposed_graph, args, is_inference=True)  # pyright: ignore


def _gcc_workaround(graph: torch.fx.Graph) -> dict[str, str]:
    """Return settings of Inductor with which GCC compiles correct code of a decomposed graph.

    GCC 11 and 12 compute wrong numbers at -O3 with AVX-512 if one file transposes two tiles of 32 x 32 half-precision
    values. Their SLP vectorizer, which merges scalar operations into vectors, is at fault; torch.compile has this bug,
    too. Graphs that transpose nothing, or hold no such values, keep it: it makes vector code of views of bits, which
    take five times as long without. Inductor accepts compiler flags in no other setting.
    """
    from torch._inductor import config

    values = [x for n in graph.nodes if isinstance(x := n.meta.get("val"), torch.Tensor)]
    if all(x.itemsize != 2 for x in values) or all(_is_in_order(x) for x in values):
        return {}
    flag = "enable_floating_point_contract_flag"  # its value becomes part of the command line, so it may hold two flags
    return {f"cpp.{flag}": f"{getattr(config.cpp, flag)} -fno-tree-slp-vectorize"}


def _is_in_order(x: torch.Tensor) -> bool:
    """Return whether a stand-in's dimensions lie in memory in their order, without symbolic sizes."""
    if any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
        return False
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and stride]
    return strides == sorted(strides, reverse=True)


class _ReshapeInterpreter(torch.fx.Interpreter):
    """Runs a graph with reshapes in place of views, since the viewed tensors may not have the traced strides."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(torch.ops.aten.reshape.default if target in _VIEWS else target, args, kwargs)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class _AtLength(_ReshapeInterpreter):
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
    return tuple([_match_strides(like, x) for x, like in zip(results, stand_ins, strict=True)])


def _match_strides(like: Any, x: Any) -> Any:
    """Return `x` with the strides of a dense stand-in: a copy if its strides differ where they matter."""
    if not isinstance(like, torch.Tensor) or have_equal_strides(x, like):
        return x
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    inverse = sorted(range(like.dim()), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def have_equal_strides(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal strides, except in dimensions of size 1."""
    return not x.numel() or all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True))
