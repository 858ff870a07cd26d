"""A program with compiled segments, as a function. Segments get arguments in the layout that they were compiled for."""

import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fzero._torch import have_equal_strides, is_profiling, node_line
from fzero.collectives import gloo
from fzero.graph.ir import COPY, WAIT, aten, copy_graph, is_input
from fzero.graph.loop import Loop, loop_function, node_loop, pipeline_function, split
from fzero.graph.planning import resolve_alias
from fzero.graph.run._clock import (
    COMPILED,
    current_recorder,
    profiler_name,
    record_time,
    segment_source,
    timed_graph,
)
from fzero.graph.run._program import LoopProgram, Program
from fzero.graph.run._published_waits import published_wait
from fzero.graph.run._segment import Segment
from fzero.graph.run._segment_compiler import Code, GraphFunction, segment_name
from fzero.sharding import flatten_by_copies, flatten_leaves

__all__ = ["Executable", "distinct_segments", "make_operations_executable", "make_segments_executable", "run_marked"]


# The results of a segment have the traced strides (`_torch.inductor`). But an operation between segments may lay out
# its result otherwise than its stand-in. Then the segment gets a copy in the traced layout.
def _with_traced_layouts(function: GraphFunction, graph: Graph, stand_ins: Sequence[Any]) -> GraphFunction:
    """Make a function that first copies the arguments whose layout differs from their stand-ins.

    The first call determines these arguments, since strides do not depend on values.

    Args:
        function: the compiled code of a segment.
        graph: the segment.
        stand_ins: stand-ins of its arguments.
    """
    mismatch_indices: list[int] | None = None

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal mismatch_indices
        if mismatch_indices is None:
            mismatch_indices = _mismatches(args, stand_ins)
            _check_not_written(graph, mismatch_indices)
        for i in mismatch_indices:
            like = stand_ins[i]
            memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=args[i].device)
            args[i] = memory.copy_(args[i])
        return function(args)

    return run


def _mismatches(args: Sequence[Any], stand_ins: Sequence[Any]) -> list[int]:
    pairs = enumerate(zip(args, stand_ins, strict=True))
    return [i for i, (x, like) in pairs if isinstance(like, torch.Tensor) and not have_equal_strides(x, like)]


def _check_not_written(graph: Graph, mismatch_indices: Sequence[int]) -> None:
    """Check that the segment writes into no argument that is copied.

    Raises:
        RuntimeError: if it does.
    """
    inputs = [n for n in graph.nodes if is_input(n)]
    overwritten: set[Node] = {resolve_alias(n.all_input_nodes[0]) for n in graph.nodes if n.target is COPY}
    if any(inputs[i] in overwritten for i in mismatch_indices):
        raise RuntimeError(
            "fzero.jit: the memory layout of an argument that the step writes into differs from the traced layout; "
            'please report this. backend="fx" runs without a compiler'
        )


# Executables: a program whose segments are compiled, as a function.
#
# `_REPLACEMENTS` maps traced operations to those that run in their place. Kernels may lay out a result otherwise than
# their stand-in: oneDNN returns a convolution's gradients in channels-last layout. So a view runs as a reshape, which
# copies only in that case.
_RESHAPES = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
_REPLACEMENTS = {**gloo.REPLACEMENTS, **_RESHAPES, flatten_leaves: flatten_by_copies}


@dataclass(frozen=True)
class Executable:
    """A runnable graph: a function from the list of its arguments, which it empties, to its results.

    Attributes:
        function: runs the graph.
        segments: how many segments it runs.
        distinct: how many of the segments have different code.
        compiled: the code of the full graph, if it was compiled at once.
        uncompiled: how many of the distinct segments run operation by operation.
    """

    function: GraphFunction
    segments: int = 0
    distinct: int = 0
    compiled: GraphFunction | None = None
    uncompiled: int = 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph."""
        return self.function(args)


def make_operations_executable(graph: Graph, owned: Sequence[int] = ()) -> Executable:
    """Make an executable that runs the graph's operations one by one, and frees each value after its last use.

    Args:
        graph: a scheduled graph.
        owned: the positions of the arguments that are also freed after their last use.
    """
    source = copy_graph(graph)
    _pop_owned(source, owned)
    graph = copy_graph(source)
    for node in graph.nodes:
        loop = node_loop(node)
        f = _make_loop_function(loop) if loop else _REPLACEMENTS.get(node.target, node.target)
        node.target = published_wait(f, node.args[0], node_line(node)) if node.target is WAIT else f
    module = GraphModule({}, graph)

    def run(args: list[Any]) -> Sequence[Any]:
        for i in owned:
            args[i] = [args[i]]
        inputs = tuple(args)
        args.clear()
        try:
            return module.forward(*inputs) if current_recorder() is None else timed_graph(module, source)(*inputs)
        except Exception as error:
            _add_line(error, _failure_line(error, source))
            raise

    return Executable(run)


_NOTE = "fzero: it failed in the step's operation of "


def _add_line(error: Exception, line: str) -> None:
    """Note the user's line of an operation that failed, unless a part of it has noted its own."""
    if line and not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        file, _, number = line.rpartition(":")
        error.add_note(f"{_NOTE}{line}: {linecache.getline(file, int(number)).strip()}")


def _failure_line(error: Exception, graph: Graph) -> str:
    """Return the user's line of the node whose generated code raised, "" if it is unknown."""
    lines = {node.name: node_line(node) for node in graph.nodes}
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            text = linecache.getline(frame.f_code.co_filename, number, frame.f_globals)
            return lines.get(text.split("=")[0].split(":")[0].strip(), "")
    return ""


def _make_loop_function(loop: Loop) -> Callable[..., list[torch.Tensor]]:
    """Make the function of a loop's node, which runs operations one by one."""
    if loop.rank_schedule is None:
        return loop_function(loop, make_operations_executable(loop.body))
    region_graphs = split(loop)
    return pipeline_function(loop, region_graphs, [make_operations_executable(g.graph, g.owned) for g in region_graphs])


def _pop_only(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors.pop()


def _pop_owned(graph: Graph, owned: Sequence[int]) -> None:
    """Pop owned arguments out of one-element lists, so that no caller keeps a reference to them."""
    inputs = [n for n in graph.nodes if is_input(n)]
    for i in owned:
        with graph.inserting_after(inputs[-1]):
            value = graph.call_function(_pop_only, (inputs[i],))
        value.meta = dict(inputs[i].meta)
        inputs[i].replace_all_uses_with(value, delete_user_cb=lambda user, value=value: user is not value)


def distinct_segments(program: Program) -> list[Code]:
    """List the distinct segments of a program in the order of their first runs."""
    segments: dict[str, Segment] = {}
    for segment in program.segments():
        segments.setdefault(segment_name(segment.key), segment)
    return [
        Code(
            graph=x.graph,
            stand_ins=x.stand_ins,
            outputs=x.outputs,
            name=name,
            location=f"segment {i} of {len(segments)}",
        )
        for i, (name, x) in enumerate(segments.items(), 1)
    ]


class _CompiledInstruction(NamedTuple):
    """An instruction whose code is compiled.

    Attributes:
        is_segment: whether `f` is the code of a segment; otherwise it is one operation.
        f: the function.
        arguments: the registers of a segment's arguments; for an operation, the function from all registers to them.
        out: the registers of a segment's results, or the register of an operation's result.
        free: the registers to free after it.
        origin: the graph of a segment or the source line of an operation; None if its parts record their own times.
    """

    is_segment: bool
    f: Callable[..., Any]
    arguments: Any
    out: Any
    free: list[int]
    origin: Graph | str | None


def make_segments_executable(program: Program, functions: Mapping[str, GraphFunction]) -> Executable:
    """Make an executable of a program. Segments without a compiled function run operation by operation."""
    instructions = [_compiled_instruction(x, functions) for x in program.instructions]

    def run(args: list[Any]) -> Sequence[Any]:
        """Run the instructions on a call's arguments, and free each register after its last use."""
        call, apply = run_marked if is_profiling() else _call_function, _apply_instruction
        if current_recorder():
            call, apply = _call_timed, _apply_timed
        registers: list[Any] = [*args, *[None] * (program.register_count - len(args))]
        args.clear()
        line = None
        try:
            for is_segment, f, arguments, out, free, origin in instructions:
                line = origin
                if is_segment:
                    inputs = [registers[i] for i in arguments]
                    for i in free:
                        registers[i] = None
                    for i, value in zip(out, call(f, inputs, origin), strict=True):
                        registers[i] = value
                    value = None
                else:
                    registers[out] = apply(f, arguments(registers), origin)
                    for i in free:
                        registers[i] = None
        except Exception as error:
            _add_line(error, line if isinstance(line, str) else "")
            raise
        return [None if i is None else registers[i] for i in program.results]

    names = [segment_name(x.key) for x in program.segments()]
    return Executable(run, len(names), len({*names}), uncompiled=len({*names} - {*functions}))


def _compiled_instruction(x: Any, functions: Mapping[str, GraphFunction]) -> _CompiledInstruction:
    """Return how an instruction runs: a segment by its compiled code if there is any, a loop by its programs."""
    if isinstance(x, Segment):
        code = None if x.scalars else functions.get(segment_name(x.key))
        return _CompiledInstruction(
            is_segment=True,
            f=make_operations_executable(x.graph) if code is None else _with_traced_layouts(code, x.graph, x.stand_ins),
            arguments=x.ins,
            out=x.outs,
            free=x.free,
            origin=None if code is None else x.graph,
        )
    if isinstance(x.target, LoopProgram):
        bodies = [make_segments_executable(program, functions) for program in x.target.programs]
        f, origin = x.target.make_function(bodies), None
    else:
        f, origin = _REPLACEMENTS.get(x.target, x.target), x.line
        f = published_wait(f, x.arguments.args[0], x.line) if x.target is WAIT else f
    return _CompiledInstruction(
        is_segment=False, f=f, arguments=x.arguments.values, out=x.out, free=x.free, origin=origin
    )


def _apply_instruction(f: Callable[..., Any], arguments: tuple[Sequence[Any], dict[str, Any]], origin: Any) -> Any:
    return f(*arguments[0], **arguments[1])


def _apply_timed(f: Callable[..., Any], arguments: tuple[Sequence[Any], dict[str, Any]], origin: Any) -> Any:
    if (note := current_recorder()) is None or origin is None:
        return f(*arguments[0], **arguments[1])
    return record_time(
        note, name=profiler_name(f), line=origin, phase="", stack=(), f=lambda: f(*arguments[0], **arguments[1])
    )


def _call_function(f: GraphFunction, args: list[Any], origin: Any) -> Sequence[Any]:
    return f(args)


def _call_timed(f: GraphFunction, args: list[Any], origin: Any) -> Sequence[Any]:
    note = current_recorder()
    if note is None or origin is None:
        return f(args)
    return record_time(note, COMPILED, *segment_source(origin), lambda: f(args))


def run_marked(f: GraphFunction, args: list[Any], origin: Any = None) -> Sequence[Any]:
    """Run a segment within a range of the profiler, which sees no operations of compiled code."""
    with torch.profiler.record_function("fzero::segment"):
        return f(args)
