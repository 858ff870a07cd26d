"""Loops: a node of a graph that runs a graph of its own, one turn after the other.

A `Loop` is to a graph what `scan` is to a JAX program. Its node takes the tensors of which each turn has a part, the
sums as they begin, and all that the body reads besides. It returns the sums, in the memory of those it was given, and
rows. Whatever the number of turns, there is one body to schedule and to compile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph.phases import RankSchedule

__all__ = ["Loop", "LoopSlice", "function_of", "graphs_in", "loop_of", "shared_graphs", "with_body"]


class LoopSlice(NamedTuple):
    """Which part of a tensor a turn has: `size` elements along `dim`, one turn's after the other's."""

    dim: int
    size: int


@dataclass(frozen=True)
class Loop:
    """What a loop's node runs.

    Attributes:
        body: a graph of one turn. Its arguments are the number of the turn, the parts, the sums, the rest, and what is
            carried. Its results are the new sums, a row of each of the other results, and what is carried.
        turns: how often it runs.
        parts: of the first tensors that the node is given.
        sums: how many there are; the node is given them after those.
        carried: how many reductions each turn leaves on their way, for the next turn to wait for. The node returns
            those of the last turn, after all others.
        track: of a rank of a pipeline, whose turns are cut in phases (`fzero.graph.phases`): what it follows.
    """

    body: Graph
    turns: int
    parts: tuple[LoopSlice, ...]
    sums: int
    carried: int = 0
    track: RankSchedule | None = None

    @property
    def places_of_sums(self) -> range:
        """The positions of the sums among the body's arguments."""
        first = 1 + len(self.parts)
        return range(first, first + self.sums)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The positions `(result, argument)` of the body's sums, each of which is written where it was."""
        return tuple(enumerate(self.places_of_sums))


def loop_of(node: Node) -> Loop | None:
    """Return the loop that a node runs, if it runs one."""
    return node.meta.get("loop")


def graphs_in(graph: Graph) -> Iterator[Graph]:
    """Yield a graph, and the bodies of its loops."""
    yield graph
    for node in graph.nodes:
        if loop := loop_of(node):
            yield loop.body


def shared_graphs(graph: Graph) -> Iterator[Graph]:
    """Yield a graph, and the bodies of those loops that are alike on all ranks: not the stages of a pipeline."""
    yield graph
    for node in graph.nodes:
        loop = loop_of(node)
        if loop and loop.track is None:
            yield loop.body


def with_body(node: Node, body: Graph) -> None:
    """Give a loop's node another body."""
    loop = loop_of(node)
    assert loop is not None
    node.meta = {**node.meta, "loop": replace(loop, body=body)}


def function_of() -> Callable[..., Any]:
    """Make the function that stands for a loop in a graph: one for each, by which it is told from others."""

    def loop(*args: Any) -> Any:
        raise AssertionError("a loop runs in an executor")

    return loop
