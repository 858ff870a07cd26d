"""A turn of a pipeline's loop, split in its phases: each a graph of its own, which is given what others have left.

What a later phase needs of an earlier one is held between them, once for each micro-batch in flight: a residual. Views,
and cheap values that depend on the loop's arguments alone, are made anew where they are needed.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero.graph._ir import is_collective, is_input, is_wait, is_write, results
from fzero.graph._ops import is_random, is_view
from fzero.graph.loop._rank_schedule import BEGINS, RECEIVED, SENT, Phase
from fzero.graph.loop._scan import Loop
from fzero.graph.passes._listing import made_of_inputs

__all__ = ["Arrival", "PhaseGraph", "Residual", "regions", "split"]


class Residual(NamedTuple):
    """A residual: the value of a node, by its name."""

    name: str


class Arrival(NamedTuple):
    """A leaf of what another stage has made: its output ("F") or the gradient of its input ("G")."""

    kind: str
    stage: int
    leaf: int


@dataclass(frozen=True)
class PhaseGraph:
    """A phase as a graph.

    Attributes:
        phase: which.
        graph: its operations.
        given: what each of its arguments is: a position among the arguments of the loop's body, a residual, or what
            another stage has made.
        made: what each of its results is: a residual, or what it makes for another stage; None for a sum, which it
            has written where it was.
    """

    phase: Phase
    graph: Graph
    given: tuple[int | Residual | Arrival, ...]
    made: tuple[Residual | Arrival | None, ...]

    @property
    def owned(self) -> tuple[int, ...]:
        """The positions of the arguments that are gone when their last reader has read them."""
        return tuple([i for i, x in enumerate(self.given) if not isinstance(x, int)])


def regions(nodes: Sequence[Node]) -> dict[Phase, range]:
    """Say where each phase of a turn begins and ends, in a body in the order in which it runs."""
    begins: list[tuple[Phase, int]] = []
    for i, n in enumerate(nodes):
        if n.target is BEGINS:
            kind, stage = n.args
            begins.append((Phase("F" if kind == "F" else "I" if stage else "W", int(stage)), i))  # pyright: ignore
        elif n.target is SENT and n.args[0] == "G":
            begins.append((Phase("W", int(n.args[1])), i + 1))  # pyright: ignore[reportArgumentType]
    ends = [i for _, i in begins[1:]] + [len(nodes) - 1]
    return {phase: range(i if k else 0, end) for k, ((phase, i), end) in enumerate(zip(begins, ends, strict=True))}


def phases_in(nodes: Sequence[Node]) -> dict[Node, Phase]:
    """Say to which phase each node of a turn belongs, of a body in the order in which it runs."""
    found: dict[Node, Phase] = {}
    for here, region in regions(nodes).items():
        for n in [nodes[i] for i in region if nodes[i].op == "call_function"]:
            of = [found[a] for a in n.all_input_nodes if a in found]
            # a sum that another stage makes may come late; and a tuple is taken apart where it is made
            late = all(phase.stage != here.stage for phase in of) or n.target is operator.getitem
            found[n] = of[-1] if of and late else here
    return found


def split(loop: Loop) -> tuple[PhaseGraph, ...]:
    """Split the body of a pipeline's loop in its phases, in their order."""
    nodes = list(loop.body.nodes)
    home = phases_in(nodes)
    cutter = _Cutter(loop, home)
    for n in nodes:
        if n in home:
            cutter.add(n)
    for value in results(loop.body):
        if isinstance(value, Node) and value in home:
            cutter.parts[home[value]].makes(None, value)
    return cutter.done()


@dataclass
class _PhaseBuilder:
    """A phase that is being made: its graph so far, the copies in it, and what goes in and out."""

    phase: Phase
    graph: Graph
    copies: dict[Node, Node]
    given: dict[int | Residual | Arrival, Node]
    made: list[tuple[Residual | Arrival | None, Node]]

    def argument(self, source: int | Residual | Arrival, node: Node) -> Node:
        """Make an argument that stands for a node."""
        if source not in self.given:
            self.given[source] = argument = Graph.placeholder(self.graph, node.name)
            argument.meta = dict(node.meta)
        return self.given[source]

    def makes(self, what: Residual | Arrival | None, node: Node) -> None:
        """Note a result."""
        if what is None or all(what != known for known, _ in self.made):
            self.made.append((what, node))


class _Cutter:
    """Deals the nodes of a body to its phases."""

    def __init__(self, loop: Loop, home: dict[Node, Phase]) -> None:
        self.home = home
        self.inputs = {n: i for i, n in enumerate(n for n in loop.body.nodes if is_input(n))}
        sums = {n for n, i in self.inputs.items() if i in loop.places_of_sums}
        cheap = made_of_inputs([n for n in loop.body.nodes if n.op == "call_function"])
        self.anew: set[Node] = set()  # what is made anew in each phase that needs it
        for n in loop.body.nodes:
            known = [a for a in n.all_input_nodes if not is_input(a)]
            moves = is_collective(n) or is_wait(n) or is_random(n)
            if n in cheap and not moves and not sums & {*n.all_input_nodes} and all(a in self.anew for a in known):
                self.anew.add(n)
        self.parts = {phase: _PhaseBuilder(phase, Graph(), {}, {}, []) for phase in dict.fromkeys(home.values())}

    def add(self, node: Node) -> None:
        """Put a node into its phase."""
        part = self.parts[self.home[node]]
        if node.target is BEGINS:
            return
        if node.target is RECEIVED:
            kind, stage, leaf = node.args[:3]
            part.copies[node] = part.argument(Arrival(kind, stage, leaf), node)  # pyright: ignore[reportArgumentType]
        elif node.target is SENT:
            kind, stage, xs = node.args
            for leaf, x in enumerate(xs):  # pyright: ignore
                self.value(part, x)  # pyright: ignore[reportArgumentType]
                part.makes(Arrival(kind, stage, leaf), x)  # pyright: ignore[reportArgumentType]
        elif node not in self.anew:
            self.copy(part, node)

    def copy(self, part: _PhaseBuilder, node: Node) -> Node:
        """Copy a node into a phase, behind what it needs."""
        for a in node.all_input_nodes:
            self.value(part, a)
        part.copies[node] = part.graph.node_copy(node, part.copies.__getitem__)
        return part.copies[node]

    def value(self, part: _PhaseBuilder, node: Node) -> Node:
        """Return what stands for a value in a phase."""
        if node in part.copies:
            return part.copies[node]
        if node in self.inputs:
            part.copies[node] = part.argument(self.inputs[node], node)
        elif node in self.anew or (self.home[node] != part.phase and is_view(node) and not self.is_made(node)):
            self.copy(part, node)
        else:
            made = self.home[node]
            assert made.precedes(part.phase), f"{node}, which {made} makes, is used in {part.phase}: it may run before"
            source = self.parts[made]
            source.makes(Residual(node.name), node)
            part.copies[node] = part.argument(Residual(node.name), node)
        return part.copies[node]

    def is_made(self, node: Node) -> bool:
        """Return whether a view is an item of a tuple that an operation has made, and not of one tensor's parts."""
        return node.target is operator.getitem and not is_view(node.all_input_nodes[0])

    def done(self) -> tuple[PhaseGraph, ...]:
        """Return the phases."""
        found = []
        for part in self.parts.values():
            part.graph.output(tuple([self.value(part, node) for _, node in part.made]))
            graph = _inputs_first(part.graph, list(part.given.values()))
            found.append(PhaseGraph(part.phase, graph, tuple(part.given), tuple([what for what, _ in part.made])))
        return tuple(found)


def _inputs_first(graph: Graph, inputs: list[Node]) -> Graph:
    """Copy a graph without what nothing needs, its arguments in this order and before all else."""
    needed = {n for n in graph.nodes if n.op == "output" or is_write(n)}
    for n in reversed(graph.nodes):
        if n in needed:
            needed.update(n.all_input_nodes)
    out, copies = Graph(), dict[Node, Node]()
    for n in [*inputs, *[n for n in graph.nodes if n.op != "placeholder" and n in needed]]:
        copies[n] = out.node_copy(n, copies.__getitem__)
    return out
