"""How a loop is written down while a step is traced, and the node of the graph that it becomes."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import is_tracing
from fzero.graph.loop._rank_schedule import RankSchedule

__all__ = [
    "OPERATIONS",
    "Loop",
    "LoopSlice",
    "NotScannable",
    "again",
    "are_recorded",
    "compared",
    "function_of",
    "graphs_in",
    "is_part",
    "loop_of",
    "part",
    "pipelines_are_recorded",
    "recorded",
    "rows",
    "shared_graphs",
    "sum_after",
    "sum_before",
    "turn",
    "with_body",
]

# Loops: a node of a graph that runs a graph of its own, one turn after the other.
#
# A `Loop` is to a graph what `scan` is to a JAX program. Its node takes the tensors of which each turn has a part, the
# sums as they begin, and all that the body reads besides. It returns the sums, in the memory of those it was given, and
# rows. Whatever the number of turns, there is one body to schedule and to compile.


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
        track: of a rank of a pipeline, whose turns are cut in phases (`fzero.graph.loop._rank_schedule`): what it
            follows.
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


# Turns: how a loop is written down while a step is traced, and its body runs once.
#
# A loop whose turns differ by their data alone is traced as one turn. The operations here stand where this turn meets
# the others and the rest of the step. `turn` is the number of the turn, and where the body begins. `part` is a turn's
# part of a tensor. `sum_before` is what the turns before have summed, and `sum_after` is that with this turn's share.
# `rows` are the values of all turns, one below the other.
#
# Python may make a turn depend on the one before: by a list that the loss function appends to, a counter, an iterator.
# So the forward pass runs `again`, and is `compared` with the first.
#
# They compute nothing: `fzero.graph.loop._trace` puts a loop in their places. In a vmap, of ranks or the user's, the
# mapped dimension goes first. So a sum has the same strides before and after a turn.


class NotScannable(RuntimeError):
    """Turns differ by more than their data, or hand on more than sums and rows."""


class _Recording(threading.local):
    on = False
    pipelines = False


_RECORDING = _Recording()


@contextmanager
def recorded(on: bool, pipelines: bool = False) -> Iterator[None]:
    """Have this thread's trace record loops as one turn, or not; and pipelines, whose ranks are such loops."""
    before = _RECORDING.on, _RECORDING.pipelines
    _RECORDING.on, _RECORDING.pipelines = on, pipelines
    try:
        yield
    finally:
        _RECORDING.on, _RECORDING.pipelines = before


def are_recorded() -> bool:
    """Return whether a trace runs that records loops as one turn."""
    return _RECORDING.on and is_tracing()


def pipelines_are_recorded() -> bool:
    """Return whether a trace runs that records a rank of a pipeline as one turn."""
    return _RECORDING.pipelines and is_tracing()


def _never(*args: Any) -> torch.Tensor:
    raise AssertionError("an operation of a loop ran outside a trace")


@torch.library.custom_op("fzero::turn", mutates_args=())
def turn(turns: int) -> torch.Tensor:
    """Begin a loop of so many turns, and return the number of the turn that runs: a 0-d int64 tensor."""
    return _never()


@torch.library.custom_op("fzero::part", mutates_args=())
def part(x: torch.Tensor, turn: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return `x.narrow(dim, turn * size, size)`."""
    return _never()


@torch.library.custom_op("fzero::sum_before", mutates_args=())
def sum_before(like: torch.Tensor, turn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what the turns before have summed, in a dtype: of the shape and the strides of this turn's share."""
    return _never()


@torch.library.custom_op("fzero::sum_after", mutates_args=())
def sum_after(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Hand on the sum that this turn has made of `before`, and return what the last turn makes."""
    return _never()


@torch.library.custom_op("fzero::rows", mutates_args=())
def rows(x: torch.Tensor, turn: torch.Tensor, turns: int) -> torch.Tensor:
    """Return this turn's value and all others', stacked along a new dimension 0."""
    return _never()


@torch.library.custom_op("fzero::again", mutates_args=())
def again(turn: torch.Tensor) -> torch.Tensor:
    """Begin to run the forward pass of a turn once more, for comparison, and return the turn's number."""
    return _never()


@torch.library.custom_op("fzero::compared", mutates_args=())
def compared(
    x: torch.Tensor, again: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]
) -> torch.Tensor:
    """Return `x`, if what has run since `again`, whose results are `second`, is what the turn ran for `first`."""
    return _never()


OPERATIONS = (turn, part, sum_before, sum_after, rows, again, compared)


def is_part(node: Node) -> bool:
    """Return whether a traced node is a turn's part of a tensor: in the eager step it is a view of that."""
    return node.target is part._opoverload


# ---------------------------------------------------------------- their shapes


def _fake(like: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a stand-in from numbers alone: what a constant's stand-in makes of it would be a constant, too."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _fake_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _fake(x, x.shape, torch.empty_like(x).stride(), dtype)


@turn.register_fake
def _(turns: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


@part.register_fake
def _(x: torch.Tensor, turn: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return _fake(x, [size if i == dim else n for i, n in enumerate(x.shape)], x.stride(), x.dtype)


@sum_before.register_fake
def _(like: torch.Tensor, turn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _fake_like(like, dtype)


@sum_after.register_fake
def _(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return _fake_like(before, before.dtype)


@rows.register_fake
def _(x: torch.Tensor, turn: torch.Tensor, turns: int) -> torch.Tensor:
    return torch.empty((turns, *x.shape), dtype=x.dtype, device=x.device)


@again.register_fake
def _(turn: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


@compared.register_fake
def _(x: torch.Tensor, again: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
    return _fake_like(x, x.dtype)


# ---------------------------------------------------------------- under vmap


def _first(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    return x if dim is None else x.movedim(dim, 0)


def _place(dim: int | None) -> int | None:
    return None if dim is None else 0


@part.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, turn: torch.Tensor, dim: int, size: int) -> Any:
    return part(_first(x, dims[0]), turn, dim + (dims[0] is not None), size), _place(dims[0])


@sum_before.register_vmap
def _(info: Any, dims: Any, like: torch.Tensor, turn: torch.Tensor, dtype: torch.dtype) -> Any:
    return sum_before(_first(like, dims[0]), turn, dtype), _place(dims[0])


@sum_after.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, before: torch.Tensor) -> Any:
    return sum_after(_first(x, dims[0]), _first(before, dims[1])), _place(dims[0])


@rows.register_vmap
def _(info: Any, dims: Any, x: torch.Tensor, turn: torch.Tensor, turns: int) -> Any:
    return rows(_first(x, dims[0]), turn, turns), None if dims[0] is None else 1


@compared.register_vmap
def _(
    info: Any, dims: Any, x: torch.Tensor, again: torch.Tensor, first: list[torch.Tensor], second: list[torch.Tensor]
) -> Any:
    return compared(_first(x, dims[0]), again, first, second), _place(dims[0])
