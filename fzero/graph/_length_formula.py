"""A scheduled graph for all batch lengths is a formula, derived from the graphs of a few."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fzero._torch import memory_like, stand_in_at, storage_id
from fzero.graph._polynomials import Polynomial, Sample, fit_all, integers_in, map_integers
from fzero.graph.ir import COMPILED, FUSED, LATE, copy_graph, node_stand_ins
from fzero.graph.loop import node_loop, set_body

__all__ = ["SAMPLES", "LengthFormula", "fit_formula", "graph_structure"]


SAMPLES = 3  # three points determine a polynomial of degree 2


class _Numbers(NamedTuple):
    """The integers of a graph and of its loop bodies.

    Attributes:
        arguments: the integers in the arguments of nodes.
        geometries: the shape, strides and offset of each value.
        memory: the bytes of each storage, in the order of the storages' first values.
    """

    arguments: tuple[Any, ...]
    geometries: tuple[Any, ...]
    memory: tuple[Any, ...]


@dataclass(frozen=True)
class LengthFormula:
    """A scheduled graph for all lengths.

    Attributes:
        graph: the graph at one length.
        numbers: polynomials in place of the graph's integers.
    """

    graph: Graph
    numbers: _Numbers

    def at(self, length: int) -> Graph:
        """Return the graph at a length. A value keeps its stand-in unless its storage depends on the length."""
        return _copy_with_numbers(
            self.graph, iter(_values_at_length(self.numbers.arguments, length)), self._values_at(length)
        )

    def _values_at(self, length: int) -> dict[int, torch.Tensor]:
        """Return replacements for the values that this length changes, by the `id` of the value in the graph."""
        storage_ids = [storage_id(x) for x in _values_in(self.graph)]
        sizes = dict(zip(dict.fromkeys(storage_ids), _values_at_length(self.numbers.memory, length), strict=True))
        value_lists = list(
            zip(_values_in(self.graph), storage_ids, _values_at_length(self.numbers.geometries, length), strict=True)
        )
        changed_keys = {
            k for x, k, new in value_lists if new != _tensor_geometry(x) or sizes[k] != x.untyped_storage().nbytes()
        }
        storages = {k: memory_like(sizes[k]) for k in sizes if k in changed_keys}
        return {id(x): stand_in_at(x, storages[k], new) for x, k, new in value_lists if k in changed_keys}


def fit_formula(graphs: Sequence[tuple[int, Graph]]) -> LengthFormula | None:
    """Fit a formula to graphs of one structure at three lengths or more; None if an integer is not a polynomial."""
    assert len(graphs) >= SAMPLES
    numbers = [_graph_numbers(graph) for _, graph in graphs]
    polynomials = [
        fit_all([Sample(length, _flatten_field(x)) for (length, _), x in zip(graphs, field, strict=True)])
        for field in zip(*numbers, strict=True)
    ]
    if any(x is None for x in polynomials):
        return None
    arguments, geometry, memory = [iter(x or ()) for x in polynomials]
    geometries = tuple([tuple([next(geometry) for _ in x]) for x in numbers[0].geometries])
    return LengthFormula(graphs[0][1], _Numbers(tuple(arguments), geometries, tuple(memory)))


def _flatten_field(field: Sequence[Any]) -> tuple[int, ...]:
    return tuple([i for x in field for i in (x if isinstance(x, tuple) else (x,))])


def _values_at_length(field: Sequence[Any], length: int) -> list[Any]:
    return [x.at(length) if isinstance(x, Polynomial) else tuple([p.at(length) for p in x]) for x in field]


def graph_structure(graph: Graph) -> Hashable:
    """Describe a graph without its integers."""
    return _structure_key(graph, {})


def _structure_key(graph: Graph, memory: dict[int, int]) -> Hashable:
    index = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        args = repr(map_integers((n.args, n.kwargs), lambda _: "#", lambda a: f"%{index[a]}"))
        storages = [memory.setdefault(storage_id(x), len(memory)) for x in node_stand_ins(n)]
        values = tuple([(x.dim(), x.dtype, x.device, i) for x, i in zip(node_stand_ins(n), storages, strict=True)])
        return n.name, _node_target(n, memory), args, values, _node_metadata(n)

    return tuple([line(n) for n in graph.nodes])


def _node_target(node: Node, memory: dict[int, int]) -> Hashable:
    loop = node_loop(node)
    if loop is None:
        return node.target
    return (
        loop.iterations,
        loop.slices,
        loop.sum_count,
        loop.carried_count,
        loop.rank_schedule,
        _structure_key(loop.body, memory),
    )


def _node_metadata(node: Node) -> Hashable:
    """Describe the metadata of a node that the plan and the executors read, besides its value."""
    carried = node.meta.get("carried")
    shapes = None if carried is None else tuple([(x.shape, x.dtype) for x in node_stand_ins(carried)])
    names = ("unit", "label", "kind", "block", "space", "own_part", LATE, FUSED, COMPILED)
    return tuple([node.meta.get(name) for name in names]), shapes


def _nodes_in(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph; the nodes of a loop's body follow the loop's node."""
    for n in graph.nodes:
        yield n
        if loop := node_loop(n):
            yield from _nodes_in(loop.body)


def _values_in(graph: Graph) -> Iterator[torch.Tensor]:
    """Yield the values of `_nodes_in`."""
    for n in _nodes_in(graph):
        yield from node_stand_ins(n)


def _graph_numbers(graph: Graph) -> _Numbers:
    tensors = list(_values_in(graph))
    arguments = [i for n in _nodes_in(graph) for i in integers_in((n.args, n.kwargs))]
    memory = {storage_id(x): x.untyped_storage().nbytes() for x in tensors}
    return _Numbers(tuple(arguments), tuple([_tensor_geometry(x) for x in tensors]), tuple(memory.values()))


def _tensor_geometry(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape, *x.stride(), int(x.storage_offset()))


def _copy_with_numbers(graph: Graph, arguments: Iterator[int], replacements: Mapping[int, torch.Tensor]) -> Graph:
    """Copy a graph with other integers and values."""
    graph = copy_graph(graph)
    for n in graph.nodes:
        n.meta.pop("flops", None)
        if "val" in n.meta:
            val = n.meta["val"]
            is_sequence = isinstance(val, list | tuple)
            n.meta["val"] = (
                type(val)([replacements.get(id(x), x) for x in val]) if is_sequence else replacements.get(id(val), val)
            )
        before = integers_in((n.args, n.kwargs))
        now = [next(arguments) for _ in before]
        if now != before:
            numbers = iter(now)
            n.args, n.kwargs = map_integers((n.args, n.kwargs), lambda _, numbers=numbers: next(numbers))
        if loop := node_loop(n):
            set_body(n, _copy_with_numbers(loop.body, arguments, replacements))
    return graph
