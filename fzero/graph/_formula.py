"""Formula: a scheduled graph for all lengths of a batch, made of the graphs of some.

Graphs that are alike but for whole numbers make one graph, whose numbers are polynomials of the length.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import memory_like, stand_in_at, storage_id
from fzero.graph.ir import COMPILED, FUSED, LATE, copied, values
from fzero.graph.loops import loop_of, with_body
from fzero.graph.polynomials import Polynomial, Sample, fit_all, mapped, whole_numbers

__all__ = ["SAMPLES", "Formula", "formula_of", "structure_of"]

SAMPLES = 3  # that a polynomial of degree 2 follows from


class _Numbers(NamedTuple):
    """The whole numbers of a graph and of the bodies of its loops.

    Attributes:
        arguments: those in the arguments of its nodes.
        forms: of each value its shape, strides and offset.
        memory: the bytes of each storage, in the order in which values lie in them first.
    """

    arguments: tuple[Any, ...]
    forms: tuple[Any, ...]
    memory: tuple[Any, ...]


@dataclass(frozen=True)
class Formula:
    """A scheduled graph for all lengths.

    Attributes:
        graph: the graph at one of them.
        numbers: polynomials in place of its numbers.
    """

    graph: Graph
    numbers: _Numbers

    def at(self, length: int) -> Graph:
        """Return the graph at a length. Values in memory that does not depend on it are the same stand-ins."""
        return _rewritten(self.graph, iter(_at(self.numbers.arguments, length)), self._values_at(length))

    def _values_at(self, length: int) -> dict[int, torch.Tensor]:
        """Return the values that another length changes, by the name of their object in the graph."""
        forms, kept = _at(self.numbers.forms, length), [storage_id(x) for x in values_in(self.graph)]
        sizes = dict(zip(dict.fromkeys(kept), _at(self.numbers.memory, length), strict=True))
        each = list(zip(values_in(self.graph), kept, forms, strict=True))
        changed = {k for x, k, form in each if form != _form(x) or sizes[k] != x.untyped_storage().nbytes()}
        storages = {k: memory_like(sizes[k]) for k in sizes if k in changed}
        return {id(x): stand_in_at(x, storages[k], form) for x, k, form in each if k in changed}


def formula_of(graphs: Sequence[tuple[int, Graph]]) -> Formula | None:
    """Make the formula of graphs of one structure, at three lengths or more; None if a number is no polynomial."""
    assert len(graphs) >= SAMPLES
    numbers = [_numbers(graph) for _, graph in graphs]
    found = [
        fit_all([Sample(length, _flat(x)) for (length, _), x in zip(graphs, field, strict=True)])
        for field in zip(*numbers, strict=True)
    ]
    if any(x is None for x in found):
        return None
    arguments, forms, memory = [iter(x or ()) for x in found]
    shaped = tuple([tuple([next(forms) for _ in form]) for form in numbers[0].forms])
    return Formula(graphs[0][1], _Numbers(tuple(arguments), shaped, tuple(memory)))


def _flat(field: Sequence[Any]) -> tuple[int, ...]:
    return tuple([i for x in field for i in (x if isinstance(x, tuple) else (x,))])


def _at(field: Sequence[Any], length: int) -> list[Any]:
    return [x.at(length) if isinstance(x, Polynomial) else tuple([p.at(length) for p in x]) for x in field]


def structure_of(graph: Graph) -> Hashable:
    """Describe a graph but for the whole numbers in it."""
    return _structure(graph, {})


def _structure(graph: Graph, memory: dict[int, int]) -> Hashable:
    number = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        given = repr(mapped((n.args, n.kwargs), lambda _: "#", lambda a: f"%{number[a]}"))
        kept = [memory.setdefault(storage_id(x), len(memory)) for x in values(n)]
        forms = tuple([(x.dim(), x.dtype, x.device, i) for x, i in zip(values(n), kept, strict=True)])
        return n.name, _target(n, memory), given, forms, _notes(n)

    return tuple([line(n) for n in graph.nodes])


def _target(node: Node, memory: dict[int, int]) -> Hashable:
    loop = loop_of(node)
    if loop is None:
        return node.target
    return loop.turns, loop.parts, loop.sums, loop.carried, loop.track, _structure(loop.body, memory)


def _notes(node: Node) -> Hashable:
    """Describe what the plan and the executors read of a node beside its value."""
    carried = node.meta.get("carried")
    shapes = None if carried is None else tuple([(x.shape, x.dtype) for x in values(carried)])
    names = ("unit", "label", "kind", "block", "space", "own_part", LATE, FUSED, COMPILED)
    return tuple([node.meta.get(name) for name in names]), shapes


# ---------------------------------------------------------------- its numbers, always in one order


def nodes_in(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph, and after each loop's those of its body."""
    for n in graph.nodes:
        yield n
        if loop := loop_of(n):
            yield from nodes_in(loop.body)


def values_in(graph: Graph) -> Iterator[torch.Tensor]:
    """Yield the values of these nodes."""
    for n in nodes_in(graph):
        yield from values(n)


def _numbers(graph: Graph) -> _Numbers:
    found = list(values_in(graph))
    arguments = [i for n in nodes_in(graph) for i in whole_numbers((n.args, n.kwargs))]
    memory = {storage_id(x): x.untyped_storage().nbytes() for x in found}
    return _Numbers(tuple(arguments), tuple([_form(x) for x in found]), tuple(memory.values()))


def _form(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape, *x.stride(), int(x.storage_offset()))


def _rewritten(graph: Graph, arguments: Iterator[int], made: Mapping[int, torch.Tensor]) -> Graph:
    """Copy a graph with other numbers and values."""
    graph = copied(graph)
    for n in graph.nodes:
        n.meta.pop("flops", None)
        if "val" in n.meta:
            val = n.meta["val"]
            many = isinstance(val, list | tuple)
            n.meta["val"] = type(val)([made.get(id(x), x) for x in val]) if many else made.get(id(val), val)
        before = whole_numbers((n.args, n.kwargs))
        now = [next(arguments) for _ in before]
        if now != before:
            again = iter(now)
            n.args, n.kwargs = mapped((n.args, n.kwargs), lambda _, again=again: next(again))
        if loop := loop_of(n):
            with_body(n, _rewritten(loop.body, arguments, made))
    return graph
