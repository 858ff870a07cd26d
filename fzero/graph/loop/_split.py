"""Split the body of a pipeline's loop into its regions, each a graph of its own.

A value that one region computes and a later region reads is a residual. Each micro-batch in flight holds its own
residuals. Views, and cheap values that depend only on the loop's arguments, are computed again in each region that
reads them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._torch import copy_nodes
from fzero.graph.ir import graph_results, input_only_nodes, is_collective, is_input, is_view, is_wait, is_write
from fzero.graph.loop._loop import Loop
from fzero.graph.loop._pipeline_marks import BEGIN_REGION, RECEIVE, SEND
from fzero.graph.loop._rank_schedule import LoopRegion

__all__ = ["RegionGraph", "Residual", "StageLeaf", "region_positions", "split"]


class Residual(NamedTuple):
    """A value that a later region reads, by the name of its node."""

    name: str


class StageLeaf(NamedTuple):
    """A leaf that one stage sends to another: of its output ("F") or of its input's gradient ("G")."""

    kind: str
    stage: int
    leaf: int


@dataclass(frozen=True)
class RegionGraph:
    """A region as a graph.

    Attributes:
        region: the region.
        graph: the region's operations.
        inputs: the source of each argument: a position among the arguments of the loop's body, a residual, or a leaf
            from another stage.
        outputs: the kind of each result: a residual, or a leaf for another stage; None for a sum, which the region
            updates in place.
    """

    region: LoopRegion
    graph: Graph
    inputs: tuple[int | Residual | StageLeaf, ...]
    outputs: tuple[Residual | StageLeaf | None, ...]

    @property
    def owned(self) -> tuple[int, ...]:
        """The positions of the arguments that are freed after their last reader in the region."""
        return tuple([i for i, x in enumerate(self.inputs) if not isinstance(x, int)])


def region_positions(nodes: Sequence[Node]) -> dict[LoopRegion, range]:
    """Return the positions of each region's nodes in a loop's body, given its nodes in the order in which they run."""
    begins: list[tuple[LoopRegion, int]] = []
    for i, n in enumerate(nodes):
        if n.target is BEGIN_REGION:
            kind, stage = n.args
            backward = "I" if stage else "W"  # the first stage has no input to differentiate
            begins.append((LoopRegion("F" if kind == "F" else backward, int(stage)), i))  # pyright: ignore
        elif n.target is SEND and n.args[0] == "G":
            begins.append((LoopRegion("W", int(n.args[1])), i + 1))  # pyright: ignore[reportArgumentType]
    ends = [i for _, i in begins[1:]] + [len(nodes) - 1]
    return {region: range(i if k else 0, end) for k, ((region, i), end) in enumerate(zip(begins, ends, strict=True))}


def _regions_in(nodes: Sequence[Node]) -> dict[Node, LoopRegion]:
    """Return the region of each operation of a loop's body, given its nodes in the order in which they run."""
    regions: dict[Node, LoopRegion] = {}
    for region, positions in region_positions(nodes).items():
        for n in [nodes[i] for i in positions if nodes[i].op == "call_function"]:
            sources = [regions[a] for a in n.all_input_nodes if a in regions]
            # a sum of another stage's values belongs to that stage, and a tuple's items to the tuple's region
            late = all(p.stage != region.stage for p in sources) or n.target is operator.getitem
            regions[n] = sources[-1] if sources and late else region
    return regions


def split(loop: Loop) -> tuple[RegionGraph, ...]:
    """Split the body of a pipeline's loop into its regions, in the order in which they run."""
    nodes = list(loop.body.nodes)
    region_of = _regions_in(nodes)
    splitter = _RegionSplitter(loop, region_of)
    for n in nodes:
        if n in region_of:
            splitter.add(n)
    for result in graph_results(loop.body):
        if isinstance(result, Node) and result in region_of:
            splitter.builders[region_of[result]].add_output(None, result)
    return splitter.build()


@dataclass
class _RegionBuilder:
    """A region under construction: its graph, the copy of each of the body's nodes in it, its inputs and outputs."""

    region: LoopRegion
    graph: Graph
    copies: dict[Node, Node]
    inputs: dict[int | Residual | StageLeaf, Node]
    outputs: list[tuple[Residual | StageLeaf | None, Node]]

    def argument(self, source: int | Residual | StageLeaf, node: Node) -> Node:
        """Return the argument that stands for a node, and add it if the region has none."""
        if source not in self.inputs:
            self.inputs[source] = argument = Graph.placeholder(self.graph, node.name)
            argument.meta = dict(node.meta)
        return self.inputs[source]

    def add_output(self, output: Residual | StageLeaf | None, node: Node) -> None:
        """Add a result."""
        if output is None or all(output != existing for existing, _ in self.outputs):
            self.outputs.append((output, node))


class _RegionSplitter:
    """Distributes the nodes of a loop's body among its regions."""

    def __init__(self, loop: Loop, region_of: dict[Node, LoopRegion]) -> None:
        """Find the operations that each region computes again, because that is cheaper than to pass their results."""
        self.region_of = region_of
        self.inputs = {n: i for i, n in enumerate(n for n in loop.body.nodes if is_input(n))}
        sums = {n for n, i in self.inputs.items() if i in loop.sum_indices}
        cheap = input_only_nodes([n for n in loop.body.nodes if n.op == "call_function"])  # no random draw is cheap
        self.duplicates: set[Node] = set()  # nodes that each region which reads them computes again
        for n in loop.body.nodes:
            operands = [a for a in n.all_input_nodes if not is_input(a)]
            moves = is_collective(n) or is_wait(n)
            if (
                n in cheap
                and not moves
                and not sums & {*n.all_input_nodes}
                and all(a in self.duplicates for a in operands)
            ):
                self.duplicates.add(n)
        self.builders = {
            r: _RegionBuilder(region=r, graph=Graph(), copies={}, inputs={}, outputs=[])
            for r in dict.fromkeys(region_of.values())
        }

    def add(self, node: Node) -> None:
        """Add a node to its region."""
        builder = self.builders[self.region_of[node]]
        if node.target is BEGIN_REGION:
            return
        if node.target is RECEIVE:
            kind, stage, leaf = node.args[:3]
            builder.copies[node] = builder.argument(StageLeaf(kind, stage, leaf), node)  # pyright: ignore[reportArgumentType]
        elif node.target is SEND:
            kind, stage, xs = node.args
            for leaf, x in enumerate(xs):  # pyright: ignore
                self.value(builder, x)  # pyright: ignore[reportArgumentType]
                builder.add_output(StageLeaf(kind, stage, leaf), x)  # pyright: ignore[reportArgumentType]
        elif node not in self.duplicates:
            self.copy(builder, node)

    def copy(self, builder: _RegionBuilder, node: Node) -> Node:
        """Copy a node into a region, after its operands."""
        for a in node.all_input_nodes:
            self.value(builder, a)
        builder.copies[node] = builder.graph.node_copy(node, builder.copies.__getitem__)
        return builder.copies[node]

    def value(self, builder: _RegionBuilder, node: Node) -> Node:
        """Return the node that stands for a value in a region, and add it if the region has none."""
        if node in builder.copies:
            return builder.copies[node]
        if node in self.inputs:
            builder.copies[node] = builder.argument(self.inputs[node], node)
        elif node in self.duplicates or (
            self.region_of[node] != builder.region and is_view(node) and not self.is_tuple_item(node)
        ):
            self.copy(builder, node)
        else:
            producer = self.region_of[node]
            assert producer.precedes(builder.region), (
                f"{builder.region} reads {node} of {producer}, and may run before it"
            )
            source = self.builders[producer]
            source.add_output(Residual(node.name), node)
            builder.copies[node] = builder.argument(Residual(node.name), node)
        return builder.copies[node]

    def is_tuple_item(self, node: Node) -> bool:
        """Return whether a view is an item of an operation's tuple of results, and not a view of one tensor."""
        return node.target is operator.getitem and not is_view(node.all_input_nodes[0])

    def build(self) -> tuple[RegionGraph, ...]:
        """Return the graphs of all regions."""
        regions = []
        for builder in self.builders.values():
            builder.graph.output(tuple([self.value(builder, node) for _, node in builder.outputs]))
            graph = _with_inputs_first(builder.graph, list(builder.inputs.values()))
            regions.append(
                RegionGraph(
                    builder.region, graph, tuple(builder.inputs), tuple([output for output, _ in builder.outputs])
                )
            )
        return tuple(regions)


def _with_inputs_first(graph: Graph, inputs: list[Node]) -> Graph:
    """Copy a graph without its dead nodes, with these arguments first and in this order."""
    live = {n for n in graph.nodes if n.op == "output" or is_write(n)}
    for n in reversed(graph.nodes):
        if n in live:
            live.update(n.all_input_nodes)
    return copy_nodes([*inputs, *[n for n in graph.nodes if n.op != "placeholder" and n in live]])
