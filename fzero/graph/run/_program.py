"""A scheduled graph as instructions over numbered slots, for the executor that runs or compiles segments."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from fzero._torch import line_of
from fzero.collectives import arrived, on_its_way
from fzero.graph._ir import copied, is_input, results, values
from fzero.graph._storages import DOWN
from fzero.graph.loop._run import following, running
from fzero.graph.loop._scan import Loop, loop_of, with_body
from fzero.graph.loop._split import PhaseGraph, split
from fzero.graph.passes._uses import family
from fzero.graph.run._groups import (
    cut,
    exports,
    needed_views,
    operands,
    parts_of_arguments,
    runs_alone,
    scalars,
    sources,
    views_to,
    written_argument,
)
from fzero.graph.run._segment import Segment, segment

__all__ = ["Operands", "Program", "SingleOperation", "Turns", "arriving", "program_of"]

# Program: a scheduled graph as instructions over numbered slots, for the executor that compiles segments.
#
# 1. Cut the graph into groups of nodes (`_groups`).
# 2. Find what each group hands on to others, as whole buffers: a view is made anew where it is used (`_groups`).
# 3. Make of each group an instruction: an operation that runs by itself, or a segment (`_segment`). Views that an
#    operation or a result needs run by themselves before it.
# 4. Note on each instruction which slots are free after it.


class Operands(NamedTuple):
    """The arguments of an operation, in which slots stand for values.

    Attributes:
        args: as in the graph.
        kwargs: as in the graph.
        slots: of each node in them.
    """

    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    slots: dict[Node, int]

    def of(self, env: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments with the values that lie in the slots."""
        slots = self.slots

        def value(a: Node) -> Any:
            return env[slots[a]]

        return map_arg(self.args, value), map_arg(self.kwargs, value)  # pyright: ignore


class Turns(NamedTuple):
    """A loop, and the program of its body; of a pipeline's loop, of each of its phases.

    Attributes:
        loop: the loop.
        programs: one, or as many as there are phases.
        parts: the phases; None of other loops.
    """

    loop: Loop
    programs: "list[Program]"
    parts: tuple[PhaseGraph, ...] | None = None

    def running(self, bodies: Sequence[Callable[[list[Any]], Sequence[Any]]]) -> Callable[..., list[Any]]:
        """Make the function of the loop's node, given what runs its programs."""
        return running(self.loop, bodies[0]) if self.parts is None else following(self.loop, self.parts, bodies)


class SingleOperation(NamedTuple):
    """An operation that runs by itself: a collective, a wait, a packing, or a view that one or a result needs.

    Attributes:
        target: the function, or the turns of a loop.
        arguments: which it is given.
        out: the slot of its result.
        free: slots that are not needed after it.
        line: the user's, as "file:line".
    """

    target: Callable[..., Any] | Turns
    arguments: Operands
    out: int
    free: list[int]
    line: str = ""


class Program(NamedTuple):
    """Instructions over numbered slots, of which the first are the graph's arguments.

    Attributes:
        instructions: in the order in which they run.
        slots: how many there are.
        results: the slots of the graph's results, None where the function returned none.
    """

    instructions: list[SingleOperation | Segment]
    slots: int
    results: list[int | None]

    def compiled(self) -> Iterator[Segment]:
        """Yield the segments that are compiled, those of loops too, in order."""
        for x in self.instructions:
            if isinstance(x, Segment):
                yield from [] if x.scalars else [x]
            elif isinstance(x.target, Turns):
                for program in x.target.programs:
                    yield from program.compiled()


def program_of(graph: Graph, owned: Sequence[int] = ()) -> Program:
    """Make a program of a scheduled graph.

    The segments to compile grow in number neither with the blocks of a model, if these have one shape, nor with the
    micro-batches.

    Args:
        graph: a scheduled graph.
        owned: the positions of the arguments that are freed after their last use; all others are the caller's.
    """
    items = {item for n in graph.nodes if loop_of(n) for item in n.users}  # values, as parts are
    groups, parts, small = cut(graph.nodes), parts_of_arguments(graph) | items, scalars(graph.nodes)
    wanted = [None if x is None else written_argument(x) for x in results(graph)]
    values = [x for x in wanted if x is not None]
    alone = needed_views(groups, values) | parts
    slot = {n: i for i, n in enumerate(n for n in graph.nodes if is_input(n))}
    instructions: list[SingleOperation | Segment] = []
    for group, exported in zip(groups, exports(groups, values), strict=True):
        single = runs_alone(group[0])
        used = group[0].all_input_nodes if single else sources(operands(group), parts)
        # a loop's results leave their tuple at once, which would hold all of them as long as the last
        found = list(group[0].users) if loop_of(group[0]) else []
        singles = [*views_to(used, slot, alone), *([group[0], *found] if single else [])]
        instructions += [_single(node, slot) for node in singles]
        compiled = None if single else segment(group, exported, slot, parts, small)
        instructions += [] if compiled is None else [compiled]
    instructions += [_single(node, slot) for node in views_to(values, slot, alone)]
    inputs = {slot[n] for n in graph.nodes if is_input(n)} - {*owned}
    kept = [None if x is None else slot[x] for x in wanted]
    return Program(_with_frees(instructions, inputs | {slot[x] for x in values}), len(slot), kept)


def _single(node: Node, slot: dict[Node, int]) -> SingleOperation:
    """Make an instruction of a node, and give its result a slot."""
    arguments = Operands(node.args, node.kwargs, {a: slot[written_argument(a)] for a in node.all_input_nodes})
    slot[node] = len(slot)
    loop = loop_of(node)
    target = _turns(loop) if loop else node.target
    assert not isinstance(target, str)
    return SingleOperation(target, arguments, slot[node], [], line_of(node))


def _turns(loop: Loop) -> Turns:
    if loop.track is None:
        return Turns(loop, [program_of(loop.body)])
    parts = split(loop)
    return Turns(loop, [program_of(part.graph, part.owned) for part in parts], parts)


def _with_frees(instructions: Sequence[SingleOperation | Segment], kept: set[int]) -> list[SingleOperation | Segment]:
    """Note on each instruction which slots are free after it; `kept` ones never are."""
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
        for s in _slots_of(instruction):
            last[s] = i
    frees: list[list[int]] = [[] for _ in instructions]
    for s, i in last.items():
        if s not in kept:
            frees[i].append(s)
    return [instruction._replace(free=free) for instruction, free in zip(instructions, frees, strict=True)]


def _slots_of(instruction: SingleOperation | Segment) -> list[int]:
    """List the slots that an instruction reads, and then those that it writes."""
    if isinstance(instruction, Segment):
        return [*instruction.ins, *instruction.outs]
    return [*instruction.arguments.slots.values(), instruction.out]


# arriving: copies from a GPU to the host are on their way until the host reads them.
#
# The copies stand on the device's own stream, in the order of its work. So what a copy reads cannot be written before
# it is done, and the host alone has to wait. A copy from the host needs no wait: what reads it stands behind it.


def arriving(graph: Graph, kinds: Collection[str] = ("cuda",)) -> Graph:
    """Start each copy to the host where it stands, and wait for it before its first use.

    Args:
        graph: a scheduled graph.
        kinds: the types of the devices whose copies can be on their way.

    Returns:
        A graph that an executor runs in its order; the graph itself if it copies nothing from such a device.
    """
    if not any(values(n)[0].device.type in kinds for n in graph.nodes if is_input(n) and values(n)):
        return graph
    graph = copied(graph)
    index = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if loop := loop_of(node):
            with_body(node, arriving(loop.body, kinds))
        elif node.target is DOWN and values(node.all_input_nodes[0])[0].device.type in kinds:
            _wait_before_use(graph, node, index)
    return graph


def _wait_before_use(graph: Graph, node: Node, index: dict[Node, int]) -> None:
    """Let a copy be on its way; its views are made of what has arrived."""
    views, users = family(node)
    node.target = on_its_way
    with graph.inserting_before(min(users, key=index.__getitem__)):
        made = {node: graph.call_function(arrived, (node,))}
        made[node].meta = dict(node.meta)
        for view in sorted(views[1:], key=index.__getitem__):
            made[view] = graph.node_copy(view, lambda a: made.get(a, a))
    for use in users:
        for old in views:
            use.replace_input_with(old, made[old])
    for view in sorted(views[1:], key=index.__getitem__, reverse=True):
        graph.erase_node(view)
