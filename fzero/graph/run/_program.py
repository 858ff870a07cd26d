"""A scheduled graph as instructions over numbered registers, for the backends that compile segments."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from fzero._torch import node_line
from fzero.collectives import start_to_host, wait_to_host
from fzero.graph.ir import TO_HOST, copy_graph, graph_results, is_input, node_stand_ins, views_and_users
from fzero.graph.loop import Loop, RegionGraph, loop_function, node_loop, pipeline_function, set_body, split
from fzero.graph.planning import (
    argument_parts,
    find_scalars,
    needed_views,
    runs_alone,
    split_into_subgraphs,
    subgraph_exports,
    subgraph_operands,
    view_sources,
    views_to,
    written_argument,
)
from fzero.graph.run._segment import Segment, make_segment

__all__ = ["LoopProgram", "Program", "make_copies_async", "make_program"]


# A program is made in four steps.
#
# 1. Split the graph into subgraphs (`_subgraphs`).
# 2. Find the values that each subgraph passes to later subgraphs. They are full buffers: each subgraph that uses a view
#    of one recomputes the view (`_subgraphs`).
# 3. Turn each subgraph into an instruction: a single operation, or a segment (`_segment`). Views that an operation or a
#    result needs run as operations before it.
# 4. Record on each instruction the registers that are free after it.
class _Operands(NamedTuple):
    """The arguments of an operation, with registers in place of values.

    Attributes:
        args: the node's positional arguments.
        kwargs: the node's keyword arguments.
        register_of: the register of each node among them.
    """

    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    register_of: dict[Node, int]

    def values(self, registers: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments, read from the values of all registers."""
        register_of = self.register_of

        def value(a: Node) -> Any:
            return registers[register_of[a]]

        return map_arg(self.args, value), map_arg(self.kwargs, value)  # pyright: ignore


class LoopProgram(NamedTuple):
    """A loop and the program of its body; for a pipeline's loop, the programs of its regions.

    Attributes:
        loop: the loop.
        programs: the program of the body, or one program for each region.
        region_graphs: the regions of a pipeline's loop; None for other loops.
    """

    loop: Loop
    programs: "list[Program]"
    region_graphs: tuple[RegionGraph, ...] | None = None

    def make_function(self, bodies: Sequence[Callable[[list[Any]], Sequence[Any]]]) -> Callable[..., list[Any]]:
        """Make the function of the loop's node, given functions that run its programs."""
        return (
            loop_function(self.loop, bodies[0])
            if self.region_graphs is None
            else pipeline_function(self.loop, self.region_graphs, bodies)
        )


class _SingleOperation(NamedTuple):
    """An operation outside of segments: a collective, a wait, a packing, or a view that these or a result need.

    Attributes:
        target: the function, or the program of a loop.
        arguments: the operation's arguments.
        out: the register of the result.
        free: the registers that are free after it.
        line: the user's source line, as "file:line".
    """

    target: Callable[..., Any] | LoopProgram
    arguments: _Operands
    out: int
    free: list[int]
    line: str = ""


class Program(NamedTuple):
    """Instructions over numbered registers. The first registers are the graph's arguments.

    Attributes:
        instructions: the instructions, in the order in which they run.
        register_count: the number of registers.
        results: the registers of the graph's results; None where the function returned None.
    """

    instructions: list[_SingleOperation | Segment]
    register_count: int
    results: list[int | None]

    def segments(self) -> Iterator[Segment]:
        """Yield the segments to compile in order, also those of loops."""
        for x in self.instructions:
            if isinstance(x, Segment):
                yield from [] if x.scalars else [x]
            elif isinstance(x.target, LoopProgram):
                for program in x.target.programs:
                    yield from program.segments()


def make_program(graph: Graph, owned: Sequence[int] = ()) -> Program:
    """Make a program of a scheduled graph.

    The number of distinct segments grows neither with a model's blocks, if these have one shape, nor with the
    micro-batches.

    Args:
        graph: a scheduled graph.
        owned: the positions of the arguments that are freed after their last use; all others are the caller's.
    """
    items = {item for n in graph.nodes if node_loop(n) for item in n.users}  # they count as values, like parts
    subgraphs = split_into_subgraphs(graph.nodes)
    parts, scalars = argument_parts(graph) | items, find_scalars(graph.nodes)
    result_values = [None if x is None else written_argument(x) for x in graph_results(graph)]
    values = [x for x in result_values if x is not None]
    view_values = needed_views(subgraphs, values) | parts
    register_of = {n: i for i, n in enumerate(n for n in graph.nodes if is_input(n))}
    instructions: list[_SingleOperation | Segment] = []
    for subgraph, output_nodes in zip(subgraphs, subgraph_exports(subgraphs, values), strict=True):
        single = runs_alone(subgraph[0])
        operand_nodes = subgraph[0].all_input_nodes if single else view_sources(subgraph_operands(subgraph), parts)
        # take a loop's results out of their tuple at once: the tuple would hold all of them until the last use
        loop_items = list(subgraph[0].users) if node_loop(subgraph[0]) else []
        singles = [*views_to(operand_nodes, register_of, view_values), *([subgraph[0], *loop_items] if single else [])]
        instructions += [_single_operation(node, register_of) for node in singles]
        segment = None if single else make_segment(subgraph, output_nodes, register_of, parts, scalars)
        if segment is not None:
            instructions.append(segment)
    instructions += [_single_operation(node, register_of) for node in views_to(values, register_of, view_values)]
    inputs = {register_of[n] for n in graph.nodes if is_input(n)} - {*owned}
    result_registers = [None if x is None else register_of[x] for x in result_values]
    permanent = inputs | {register_of[x] for x in values}
    return Program(_record_frees(instructions, permanent), len(register_of), result_registers)


def _single_operation(node: Node, register_of: dict[Node, int]) -> _SingleOperation:
    """Turn a node into an instruction, and give its result a register."""
    arguments = _Operands(node.args, node.kwargs, {a: register_of[written_argument(a)] for a in node.all_input_nodes})
    register_of[node] = len(register_of)
    loop = node_loop(node)
    target = _loop_program(loop) if loop else node.target
    assert not isinstance(target, str)
    return _SingleOperation(target=target, arguments=arguments, out=register_of[node], free=[], line=node_line(node))


def _loop_program(loop: Loop) -> LoopProgram:
    if loop.rank_schedule is None:
        return LoopProgram(loop, [make_program(loop.body)])
    region_graphs = split(loop)
    return LoopProgram(loop, [make_program(g.graph, g.owned) for g in region_graphs], region_graphs)


def _record_frees(
    instructions: Sequence[_SingleOperation | Segment], permanent: set[int]
) -> list[_SingleOperation | Segment]:
    """Record on each instruction the registers that are free after it; `permanent` registers never are."""
    last_uses: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
        for register in _instruction_registers(instruction):
            last_uses[register] = i
    frees: list[list[int]] = [[] for _ in instructions]
    for register, i in last_uses.items():
        if register not in permanent:
            frees[i].append(register)
    return [instruction._replace(free=free) for instruction, free in zip(instructions, frees, strict=True)]


def _instruction_registers(instruction: _SingleOperation | Segment) -> list[int]:
    """List the registers that an instruction reads, then the registers that it writes."""
    if isinstance(instruction, Segment):
        return [*instruction.ins, *instruction.outs]
    return [*instruction.arguments.register_of.values(), instruction.out]


# Copies from a GPU to the host are asynchronous until the host reads them.
#
# The copies run on the device's own stream, in the order of its work. So later work cannot overwrite the source of a
# copy, and only the host has to wait. A copy from the host needs no wait: its readers come after it on the stream.
def make_copies_async(graph: Graph, kinds: Collection[str] = ("cuda",)) -> Graph:
    """Make each copy to the host asynchronous, with a wait before its first use.

    Args:
        graph: a scheduled graph.
        kinds: the types of the devices whose copies can be asynchronous.

    Returns:
        A graph to run in its order; the graph itself if none of its arguments lies on such a device.
    """
    if not any(node_stand_ins(n)[0].device.type in kinds for n in graph.nodes if is_input(n) and node_stand_ins(n)):
        return graph
    graph = copy_graph(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if loop := node_loop(node):
            set_body(node, make_copies_async(loop.body, kinds))
        elif node.target is TO_HOST and node_stand_ins(node.all_input_nodes[0])[0].device.type in kinds:
            _wait_before_use(graph, node, index)
    return graph


def _wait_before_use(graph: Graph, node: Node, index: dict[Node, int]) -> None:
    """Make a copy asynchronous, and wait for it before its first use. Its views are taken after the wait."""
    views, users = views_and_users(node)
    node.target = start_to_host
    with graph.inserting_before(min(users, key=index.__getitem__)):
        copies = {node: graph.call_function(wait_to_host, (node,))}
        copies[node].meta = dict(node.meta)
        for view in sorted(views[1:], key=index.__getitem__):
            copies[view] = graph.node_copy(view, lambda a: copies.get(a, a))
    for use in users:
        for old in views:
            use.replace_input_with(old, copies[old])
    for view in sorted(views[1:], key=index.__getitem__, reverse=True):
        graph.erase_node(view)
