"""A program with compiled segments, as a function. A segment gets arguments that lie as it was compiled for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fzero._torch import have_equal_strides, profiling
from fzero.collectives import gloo
from fzero.graph._ir import COPY, aten, copied, is_input
from fzero.graph.loop._run import following, running
from fzero.graph.loop._scan import Loop, loop_of
from fzero.graph.loop._split import split
from fzero.graph.run._clock import COMPILED, name_of, now, place_of, timed, timed_graph
from fzero.graph.run._compile import Code, Runs, name_of_code
from fzero.graph.run._groups import source_of
from fzero.graph.run._program import Program, Turns
from fzero.graph.run._segment import Segment
from fzero.sharding import packed, packed_by_copies

__all__ = ["Executable", "codes_of", "in_pieces", "one_by_one", "run_marked", "within_borders"]


# Borders: compiled code is given what lies as it was compiled for.
#
# What a segment makes has the strides that were traced (`_torch.inductor`). An operation between segments may lay its
# result out otherwise than its stand-in says. Then a copy goes over the border.


def within_borders(runs: Runs, graph: Graph, fakes: Sequence[Any]) -> Runs:
    """Make a function that copies those arguments which do not lie as their stand-ins.

    Which these are is seen at the first call: strides do not depend on values.

    Args:
        runs: the code of a segment.
        graph: the segment.
        fakes: stand-ins of its arguments.
    """
    odd: list[int] | None = None

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal odd
        if odd is None:
            odd = _odd(args, fakes)
            _check_not_written(graph, odd)
        for i in odd:
            fake = fakes[i]
            args[i] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=args[i].device).copy_(
                args[i]
            )
        return runs(args)

    return run


def _odd(args: Sequence[Any], fakes: Sequence[Any]) -> list[int]:
    pairs = enumerate(zip(args, fakes, strict=True))
    return [i for i, (x, fake) in pairs if isinstance(fake, torch.Tensor) and not have_equal_strides(x, fake)]


def _check_not_written(graph: Graph, odd: Sequence[int]) -> None:
    """Check that no write would go to a copy.

    Raises:
        RuntimeError: if one would.
    """
    inputs = [n for n in graph.nodes if is_input(n)]
    written: set[Node] = {source_of(n.all_input_nodes[0]) for n in graph.nodes if n.target is COPY}
    if any(inputs[i] in written for i in odd):
        raise RuntimeError(
            "fzero.jit: an argument that the step writes into does not lie as when it was traced; please report it. "
            'backend="fx" runs without a compiler'
        )


# Pieces: a program whose segments are compiled, as a function.
#
# What runs in place of what was traced. Kernels may lay a result out otherwise than their stand-in says: oneDNN gives a
# convolution's gradients channels last. So a view is a reshape, which copies only then.
RESHAPES = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
INSTEAD = {**gloo.INSTEAD, **RESHAPES, packed: packed_by_copies}


@dataclass(frozen=True)
class Executable:
    """A scheduled graph that can run: a function of the list of its arguments, which it empties, to its results.

    Attributes:
        runs: the function.
        segments: how many segments it runs.
        distinct: how many of them are different code.
        compiled: what Inductor made of the whole graph, if it was given the whole.
        uncompiled: how many of the distinct ones run operation by operation after all.
    """

    runs: Runs
    segments: int = 0
    distinct: int = 0
    compiled: Runs | None = None
    uncompiled: int = 0

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph."""
        return self.runs(args)


def one_by_one(graph: Graph, owned: Sequence[int] = ()) -> Executable:
    """Run the graph's operations one by one, each value freed after its last use.

    Args:
        graph: a scheduled graph.
        owned: the positions of the arguments that are freed after their last use, too.
    """
    source = copied(graph)
    _take(source, owned)
    graph = copied(source)
    for node in graph.nodes:
        loop = loop_of(node)
        node.target = _running(loop) if loop else INSTEAD.get(node.target, node.target)
    module = GraphModule({}, graph)

    def run(args: list[Any]) -> Sequence[Any]:
        for i in owned:
            args[i] = [args[i]]
        mine = tuple(args)
        args.clear()
        return module.forward(*mine) if now() is None else timed_graph(module, source)(*mine)

    return Executable(run)


def _running(loop: Loop) -> Callable[..., list[torch.Tensor]]:
    """Make the function of a loop's node, whose operations run one by one."""
    if loop.track is None:
        return running(loop, one_by_one(loop.body))
    parts = split(loop)
    return following(loop, parts, [one_by_one(part.graph, part.owned) for part in parts])


def _taken(one: list[torch.Tensor]) -> torch.Tensor:
    return one.pop()


def _take(graph: Graph, owned: Sequence[int]) -> None:
    """Take some arguments out of a list, so that nobody else holds them."""
    inputs = [n for n in graph.nodes if is_input(n)]
    for i in owned:
        with graph.inserting_after(inputs[-1]):
            taken = graph.call_function(_taken, (inputs[i],))
        taken.meta = dict(inputs[i].meta)
        inputs[i].replace_all_uses_with(taken, delete_user_cb=lambda user, taken=taken: user is not taken)


def codes_of(program: Program) -> list[Code]:
    """List the distinct segments of a program, in the order in which they are first run."""
    found: dict[str, Segment] = {}
    for segment in program.compiled():
        found.setdefault(name_of_code(segment.key), segment)
    return [
        Code(x.graph, x.fakes, x.made, name, f"segment {i} of {len(found)}")
        for i, (name, x) in enumerate(found.items(), 1)
    ]


class _Ready(NamedTuple):
    """An instruction whose code is compiled.

    Attributes:
        is_segment: whether `f` is compiled code of several values, or one operation.
        f: the function.
        given: of a segment the slots of its arguments; of an operation the function from all slots to its arguments.
        out: the slots of a segment's results; the slot of an operation's.
        free: slots that are not needed after it.
        origin: the graph of a segment, the line of an operation; None of what notes the time of its parts itself.
    """

    is_segment: bool
    f: Callable[..., Any]
    given: Any
    out: Any
    free: list[int]
    origin: Graph | str | None


def in_pieces(program: Program, compiled: Mapping[str, Runs]) -> Executable:
    """Run a program, with the functions of its segments by the name of their code; those that have none uncompiled."""
    ready: list[_Ready] = []
    for x in program.instructions:
        if isinstance(x, Segment):
            code = None if x.scalars else compiled.get(name_of_code(x.key))
            runs = one_by_one(x.graph) if code is None else within_borders(code, x.graph, x.fakes)
            ready.append(_Ready(True, runs, x.ins, x.outs, x.free, None if code is None else x.graph))
        elif isinstance(x.target, Turns):
            bodies = [in_pieces(program, compiled) for program in x.target.programs]
            loop = x.target.running(bodies)
            ready.append(_Ready(False, loop, x.arguments.of, x.out, x.free, None))
        else:
            f = INSTEAD.get(x.target, x.target)
            ready.append(_Ready(False, f, x.arguments.of, x.out, x.free, x.line))

    def run(args: list[Any]) -> Sequence[Any]:
        call = _timed if now() else run_marked if profiling() else _called
        apply = _applied_timed if now() else _applied
        env: list[Any] = [*args, *[None] * (program.slots - len(args))]
        args.clear()
        for is_segment, f, given, out, free, origin in ready:
            if is_segment:
                mine = [env[i] for i in given]
                for i in free:
                    env[i] = None
                for i, value in zip(out, call(f, mine, origin), strict=True):
                    env[i] = value
                value = None
            else:
                env[out] = apply(f, given(env), origin)
                for i in free:
                    env[i] = None
        return [None if i is None else env[i] for i in program.results]

    names = [name_of_code(x.key) for x in program.compiled()]
    return Executable(run, len(names), len({*names}), uncompiled=len({*names} - {*compiled}))


def _applied(f: Callable[..., Any], given: tuple[Sequence[Any], dict[str, Any]], origin: Any) -> Any:
    return f(*given[0], **given[1])


def _applied_timed(f: Callable[..., Any], given: tuple[Sequence[Any], dict[str, Any]], origin: Any) -> Any:
    if (note := now()) is None or origin is None:
        return f(*given[0], **given[1])
    return timed(note, name_of(f), origin, "", lambda: f(*given[0], **given[1]))


def _called(f: Runs, args: list[Any], origin: Any) -> Sequence[Any]:
    return f(args)


def _timed(f: Runs, args: list[Any], origin: Any) -> Sequence[Any]:
    note = now()
    if note is None or origin is None:
        return f(args)
    return timed(note, COMPILED, *place_of(origin), lambda: f(args))


def run_marked(f: Runs, args: list[Any], origin: Any = None) -> Sequence[Any]:
    """Let the profiler see a segment: compiled code calls no operations."""
    with torch.profiler.record_function("fzero::segment"):
        return f(args)
