"""Loops over micro-batches in a graph: the node that runs a loop, and the loop's body.

A `Loop` is to a graph what `scan` is to a JAX program. Its node takes the tensors that iterations slice, the initial
sums, and all other values that the body reads. It returns the sums, in the memory of the initial sums, and the rows.
There is one body to schedule and to compile, whatever the number of iterations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fzero.graph.loop._rank_schedule import RankSchedule

__all__ = ["Loop", "LoopSlice", "graphs_in", "new_loop_function", "node_loop", "set_body", "shared_graphs"]


class LoopSlice(NamedTuple):
    """The slices of a tensor: iteration i reads `size` elements along `dim`, from `i * size` on."""

    dim: int
    size: int


@dataclass(frozen=True)
class Loop:
    """The loop that a node runs.

    Attributes:
        body: the graph of one iteration. Its arguments are the iteration's number, the slices, the sums, the other
            values, and the carried reductions. Its results are the new sums, the rows, and the carried reductions.
        iterations: the number of iterations.
        slices: how iterations slice the first tensors among the node's arguments.
        sum_count: the number of sums; the node takes them after the sliced tensors.
        carried_count: the number of reductions that each iteration starts and the next one waits for. The node returns
            those of the last iteration, after all other results.
        rank_schedule: for a rank of a pipeline, the schedule that it follows; else None.
        sends_early: whether a pipeline stage sends its input's gradient before it computes those of its weights.
    """

    body: Graph
    iterations: int
    slices: tuple[LoopSlice, ...]
    sum_count: int
    carried_count: int = 0
    rank_schedule: RankSchedule | None = None
    sends_early: bool = False

    @property
    def sum_indices(self) -> range:
        """The positions of the sums among the body's arguments."""
        first = 1 + len(self.slices)
        return range(first, first + self.sum_count)

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """The positions `(result, argument)` of the body's sums, which are updated in place."""
        return tuple(enumerate(self.sum_indices))

    @property
    def splits_backward(self) -> bool:
        """Whether this is the loop of a pipeline whose schedule splits backward passes into halves."""
        return self.rank_schedule is not None and self.rank_schedule.splits_backward


def node_loop(node: Node) -> Loop | None:
    """Return the loop that a node runs; None for other nodes."""
    return node.meta.get("loop")


def graphs_in(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the bodies of its loops."""
    yield graph
    for node in graph.nodes:
        if loop := node_loop(node):
            yield loop.body


def shared_graphs(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the bodies of its loops that are the same on all ranks: not those of a pipeline's stages."""
    yield graph
    for node in graph.nodes:
        loop = node_loop(node)
        if loop and loop.rank_schedule is None:
            yield loop.body


def set_body(node: Node, body: Graph, **changes: Any) -> None:
    """Replace the body of a loop's node, and other attributes of the loop."""
    loop = node_loop(node)
    assert loop is not None
    node.meta = {**node.meta, "loop": replace(loop, body=body, **changes)}


def new_loop_function() -> Callable[..., Any]:
    """Return a new function that stands for one loop in a graph; each loop has its own."""

    def loop(*args: Any) -> Any:
        raise AssertionError("a loop runs in an executor")

    return loop
