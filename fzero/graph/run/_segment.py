"""Segments: groups of operations as graphs of their own, described so that equal ones are compiled once."""

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph.ir import COPY, is_input, signature
from fzero.graph.run._between import operands, sources
from fzero.graph.run._rounded import take_rounded
from fzero.graph.run._scalars import read_by_loops

__all__ = ["Segment", "segment"]


class Segment(NamedTuple):
    """Operations that are compiled together.

    Attributes:
        key: segments with equal code have equal ones.
        graph: the code: its arguments are the slots `ins`, its results go to the slots `outs`.
        fakes: stand-ins of the arguments.
        made: stand-ins of the results.
        ins: slots.
        outs: slots.
        free: slots that are not needed after it.
        scalars: whether it computes 0-d values only. Torch runs them: to compile them takes longer than they ever do.
    """

    key: Hashable
    graph: Graph
    fakes: list[torch.Tensor]
    made: list[torch.Tensor]
    ins: list[int]
    outs: list[int]
    free: list[int]
    scalars: bool = False


def segment(
    group: Sequence[Node],
    exports: Sequence[Node],
    slot: dict[Node, int],
    parts: AbstractSet[Node],
    small: AbstractSet[Node],
) -> Segment | None:
    """Make a segment of a group, or nothing of a group whose results nobody needs.

    Args:
        group: nodes that are compiled together.
        exports: those of them that others need. They are given new slots.
        slot: of all values that are there.
        parts: the views that count as values.
        small: the scalars of the graph.
    """
    if not exports and not any(n.target is COPY for n in group):
        return None
    exports = list(dict.fromkeys([*exports, *read_by_loops(group, small)]))
    graph = Graph()
    ins = [x for x in sources(operands(group), parts) if x in slot]
    copies: dict[Node, Node] = {}
    for i, x in enumerate(ins):
        copies[x] = graph.placeholder(f"x{i}")
        copies[x].meta = {"val": x.meta["val"]}
    for node in group:
        for a in node.all_input_nodes:
            _copy_views(a, graph, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in exports)).meta = {}
    take_rounded(graph)
    graph.eliminate_dead_code()
    for x in exports:
        slot[x] = len(slot)
    fakes, made = [x.meta["val"] for x in ins], [x.meta["val"] for x in exports]
    key, scalars = (_key(graph), tuple([signature(x) for x in made])), small >= {*group}
    return Segment(key, graph, fakes, made, [slot[x] for x in ins], [slot[x] for x in exports], [], scalars)


def _copy_views(node: Node, graph: Graph, copies: dict[Node, Node]) -> None:
    """Make a value anew in a segment's graph if it is not there: a view, and the views that it is made of."""
    todo = [node]
    while todo:
        n = todo[-1]
        missing = [] if n in copies else [a for a in n.all_input_nodes if a not in copies]
        if missing:
            todo += missing
            continue
        if n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        todo.pop()


def _key(graph: Graph) -> Hashable:
    """Describe a graph so that equal descriptions have equal code."""
    number = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return signature(n.meta["val"])
        return str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: _Number(number[a])))  # pyright: ignore

    return tuple([line(n) for n in graph.nodes])


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"
