"""The graph of non-finite values: edges from each value to its parents, on all ranks, back to the first ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["Edge", "NonFiniteResult", "NonFiniteValue", "ValueCause", "ValueGraph", "explain", "pack", "unpack"]


class Edge(NamedTuple):
    """An edge to a parent of a value: the number of the parent, and whether a nan came from it."""

    number: int
    nan: bool


@dataclass(frozen=True)
class ValueCause:
    """The cause of a value.

    Attributes:
        order: its order in time: the number of collectives before it, the rank of the process, the number of the value.
        ranks: the ranks that made it.
        leaf: the leaf of an argument that held it; "" if an operation made it.
        operation: the operation that made it.
        value: "nan", "inf", "-inf", or several of them.
        inputs: the inputs of the operation, as text.
        line: the user's line, as "file:line".
        code: the text of the line.
        backward: the node of the backward pass.
        is_intended: whether the program asked for it, as for a mask of -inf.
    """

    order: tuple[int, int, int]
    ranks: tuple[int, ...]
    leaf: str = ""
    operation: str = ""
    value: str = ""
    inputs: str = ""
    line: str = ""
    code: str = ""
    backward: str = ""
    is_intended: bool = False


@dataclass
class NonFiniteValue:
    """A non-finite value.

    Attributes:
        nan: whether it holds nan, and not only infinities.
        parents: the values that it was made of.
        cause: its cause, if it may be the first non-finite value.
        collective: the number of the collective, if the value came from other ranks.
    """

    nan: bool
    parents: list[Edge]
    cause: ValueCause | None = None
    collective: int | None = None


class NonFiniteResult(NamedTuple):
    """A result that is not finite: its path, whether it holds nan, and its parents."""

    path: str
    nan: bool
    parents: list[Edge]


@dataclass
class ValueGraph:
    """The non-finite values of a process, its non-finite results, and its operands of each collective."""

    values: list[NonFiniteValue] = field(default_factory=list)
    results: list[NonFiniteResult] = field(default_factory=list)
    operands: dict[int, list[Edge]] = field(default_factory=dict)


def pack(graph: ValueGraph) -> Any:
    """Return a graph as lists and dicts, for JSON."""
    return asdict(graph) | {"results": [[r.path, r.nan, r.parents] for r in graph.results]}


def unpack(data: Any) -> ValueGraph:
    """Return the graph from the output of `pack`."""

    def edges(items: Any) -> list[Edge]:
        return [Edge(*e) for e in items]

    def cause(o: Any) -> ValueCause | None:
        return o and ValueCause(**{**o, "order": tuple(o["order"]), "ranks": tuple(o["ranks"])})

    values = [NonFiniteValue(m["nan"], edges(m["parents"]), cause(m["cause"]), m["collective"]) for m in data["values"]]
    results = [NonFiniteResult(path, nan, edges(parents)) for path, nan, parents in data["results"]]
    return ValueGraph(values, results, {int(k): edges(items) for k, items in data["operands"].items()})


class _Explanation(NamedTuple):
    """The cause of non-finite results, and the cause of the nan that was made of an infinity."""

    cause: ValueCause | None
    nan_cause: ValueCause | None


_Node = tuple[int, int]  # a process, and the number of a value in its graph


def explain(graphs: Sequence[ValueGraph]) -> _Explanation:
    """Find the cause of the non-finite results of all processes."""
    results = [(p, r) for p, graph in enumerate(graphs) for r in graph.results]
    nans = _walk_back(graphs, [(p, e.number) for p, r in results if r.nan for e in r.parents if e.nan], nan=True)
    for node in _sort_by_time(graphs, nans):
        sources = _walk_back(graphs, [parent for parent, _ in _find_parents(graphs, node)], nan=False)
        first = [n for n in _sort_by_time(graphs, sources) if not _find_cause(graphs, n).is_intended]
        if first:
            return _Explanation(_add_all_ranks(graphs, first[0], sources), _add_all_ranks(graphs, node, nans))
        return _Explanation(_add_all_ranks(graphs, node, nans), None)
    infinities = _walk_back(graphs, [(p, e.number) for p, r in results for e in r.parents], nan=False)
    candidates = sorted(_sort_by_time(graphs, infinities), key=lambda n: _find_cause(graphs, n).is_intended)
    return _Explanation(_add_all_ranks(graphs, candidates[0], infinities) if candidates else None, None)


def _find_parents(graphs: Sequence[ValueGraph], node: _Node) -> Iterator[tuple[_Node, bool]]:
    """Yield the parents of a value: on its own process, or those that all ranks sent into a collective."""
    process, number = node
    value = graphs[process].values[number]
    for e in value.parents:
        yield (process, e.number), e.nan
    if value.collective is not None:
        for source, graph in enumerate(graphs):
            for e in graph.operands.get(value.collective, ()):
                yield (source, e.number), e.nan


def _walk_back(graphs: Sequence[ValueGraph], start: Iterable[_Node], nan: bool) -> set[_Node]:
    """Walk back from values, along edges of nan only or along all edges, to the values without parents."""
    stack = list(start)
    visited = set[_Node]()
    ends = set[_Node]()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        sources = [source for source, is_nan in _find_parents(graphs, node) if is_nan or not nan]
        stack += sources
        if not sources and graphs[node[0]].values[node[1]].cause is not None:
            ends.add(node)
    return ends


def _find_cause(graphs: Sequence[ValueGraph], node: _Node) -> ValueCause:
    cause = graphs[node[0]].values[node[1]].cause
    assert cause is not None
    return cause


def _sort_by_time(graphs: Sequence[ValueGraph], nodes: Iterable[_Node]) -> list[_Node]:
    return sorted(nodes, key=lambda n: _find_cause(graphs, n).order)


def _add_all_ranks(graphs: Sequence[ValueGraph], node: _Node, nodes: Iterable[_Node]) -> ValueCause:
    """Return the cause of a value, with all ranks that made a value at the same source."""
    cause, causes = _find_cause(graphs, node), [_find_cause(graphs, n) for n in nodes]

    def source(o: ValueCause) -> Any:
        return o.leaf, o.operation, o.line, o.backward

    ranks = sorted({r for o in causes if source(o) == source(cause) for r in o.ranks})
    return ValueCause(**{**asdict(cause), "ranks": tuple(ranks)})
