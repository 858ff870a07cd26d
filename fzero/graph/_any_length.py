"""Graphs for batch lengths that were not traced: the graphs of three lengths determine those of all others.

Tracing is most of the cost of a new length. But a new length may take another branch in Python, or its sizes may
depend on the length in another way. So the step runs once more, on stand-ins with a symbolic length, to record which
decisions depend on the length (`fzero._torch.decisions`). Sizes must be polynomials of the length of degree at most 2,
which three lengths determine. A length that changes the outcome of a decision is traced.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fzero import _torch
from fzero._torch import memory_like, stand_in_at, storage_id
from fzero.graph._candidates import Candidate
from fzero.graph._collector import pause_collector
from fzero.graph._entry import Entry, JitOptions
from fzero.graph._one_rank import one_rank_tree, planned_mesh
from fzero.graph._polynomials import Polynomial, Sample, Shapes, fit_all, integers_in, map_integers, shapes_of
from fzero.graph._trace_agreement import gather_values
from fzero.graph.ir import COMPILED, FUSED, LATE, copy_graph, is_input, stand_ins_of
from fzero.graph.loop._loop import loop_of, set_body
from fzero.graph.loop._loop_marks import record_loops
from fzero.graph.planning._clocks import estimate_seconds
from fzero.graph.planning._live_ranges import peak_bytes
from fzero.graph.trace._call_arguments import Arguments, Key, flatten_arguments
from fzero.ranks import Mesh

__all__ = ["AnyLength", "differ_in_sizes"]

# Formula: a scheduled graph for all batch lengths, derived from the graphs of a few.
#
# Graphs that differ only in integers become one graph, whose integers are polynomials of the length.


_SAMPLES = 3  # three points determine a polynomial of degree 2


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
class _Formula:
    """A scheduled graph for all lengths.

    Attributes:
        graph: the graph at one length.
        numbers: polynomials in place of the graph's integers.
    """

    graph: Graph
    numbers: _Numbers

    def at(self, length: int) -> Graph:
        """Return the graph at a length. A value keeps its stand-in unless its storage depends on the length."""
        return _rewrite(self.graph, iter(_at(self.numbers.arguments, length)), self._values_at(length))

    def _values_at(self, length: int) -> dict[int, torch.Tensor]:
        """Return replacements for the values that this length changes, by the `id` of the value in the graph."""
        storage_ids = [storage_id(x) for x in _values_in(self.graph)]
        sizes = dict(zip(dict.fromkeys(storage_ids), _at(self.numbers.memory, length), strict=True))
        each = list(zip(_values_in(self.graph), storage_ids, _at(self.numbers.geometries, length), strict=True))
        changed = {k for x, k, new in each if new != _geometry(x) or sizes[k] != x.untyped_storage().nbytes()}
        storages = {k: memory_like(sizes[k]) for k in sizes if k in changed}
        return {id(x): stand_in_at(x, storages[k], new) for x, k, new in each if k in changed}


def _fit_formula(graphs: Sequence[tuple[int, Graph]]) -> _Formula | None:
    """Fit a formula to graphs of one structure at three lengths or more; None if an integer is not a polynomial."""
    assert len(graphs) >= _SAMPLES
    numbers = [_numbers(graph) for _, graph in graphs]
    fits = [
        fit_all([Sample(length, _flat(x)) for (length, _), x in zip(graphs, field, strict=True)])
        for field in zip(*numbers, strict=True)
    ]
    if any(x is None for x in fits):
        return None
    arguments, geometry, memory = [iter(x or ()) for x in fits]
    geometries = tuple([tuple([next(geometry) for _ in x]) for x in numbers[0].geometries])
    return _Formula(graphs[0][1], _Numbers(tuple(arguments), geometries, tuple(memory)))


def _flat(field: Sequence[Any]) -> tuple[int, ...]:
    return tuple([i for x in field for i in (x if isinstance(x, tuple) else (x,))])


def _at(field: Sequence[Any], length: int) -> list[Any]:
    return [x.at(length) if isinstance(x, Polynomial) else tuple([p.at(length) for p in x]) for x in field]


def _graph_structure(graph: Graph) -> Hashable:
    """Describe a graph without its integers."""
    return _structure(graph, {})


def _structure(graph: Graph, memory: dict[int, int]) -> Hashable:
    index = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        args = repr(map_integers((n.args, n.kwargs), lambda _: "#", lambda a: f"%{index[a]}"))
        storages = [memory.setdefault(storage_id(x), len(memory)) for x in stand_ins_of(n)]
        values = tuple([(x.dim(), x.dtype, x.device, i) for x, i in zip(stand_ins_of(n), storages, strict=True)])
        return n.name, _target(n, memory), args, values, _metadata(n)

    return tuple([line(n) for n in graph.nodes])


def _target(node: Node, memory: dict[int, int]) -> Hashable:
    loop = loop_of(node)
    if loop is None:
        return node.target
    return (
        loop.iterations,
        loop.slices,
        loop.sum_count,
        loop.carried_count,
        loop.rank_schedule,
        _structure(loop.body, memory),
    )


def _metadata(node: Node) -> Hashable:
    """Describe the metadata of a node that the plan and the executors read, besides its value."""
    carried = node.meta.get("carried")
    shapes = None if carried is None else tuple([(x.shape, x.dtype) for x in stand_ins_of(carried)])
    names = ("unit", "label", "kind", "block", "space", "own_part", LATE, FUSED, COMPILED)
    return tuple([node.meta.get(name) for name in names]), shapes


# The integers of a graph, always in one order.


def _nodes_in(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph; the nodes of a loop's body follow the loop's node."""
    for n in graph.nodes:
        yield n
        if loop := loop_of(n):
            yield from _nodes_in(loop.body)


def _values_in(graph: Graph) -> Iterator[torch.Tensor]:
    """Yield the values of `_nodes_in`."""
    for n in _nodes_in(graph):
        yield from stand_ins_of(n)


def _numbers(graph: Graph) -> _Numbers:
    tensors = list(_values_in(graph))
    arguments = [i for n in _nodes_in(graph) for i in integers_in((n.args, n.kwargs))]
    memory = {storage_id(x): x.untyped_storage().nbytes() for x in tensors}
    return _Numbers(tuple(arguments), tuple([_geometry(x) for x in tensors]), tuple(memory.values()))


def _geometry(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape, *x.stride(), int(x.storage_offset()))


def _rewrite(graph: Graph, arguments: Iterator[int], replacements: Mapping[int, torch.Tensor]) -> Graph:
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
            again = iter(now)
            n.args, n.kwargs = map_integers((n.args, n.kwargs), lambda _, again=again: next(again))
        if loop := loop_of(n):
            set_body(n, _rewrite(loop.body, arguments, replacements))
    return graph


_MAX_TRACES = 8  # traces; three of them must have the same structure
_NEEDS_MORE = "more lengths must be traced"

_log = logging.getLogger("fzero.jit")


@dataclass(frozen=True)
class _TracedCall:
    """A traced call, and its length."""

    length: int
    key: Key
    entry: Entry

    @cached_property
    def structure(self) -> Hashable:
        """The schedule without its integers. It may differ by length, since passes treat small values otherwise."""
        e = self.entry
        donation = tuple(e.overwrites.items()), tuple(e.donation_notes.items()), tuple(e.reused_tensors)
        return _graph_structure(e.best.graph), donation, tuple(e.passthrough), e.structure


@dataclass
class AnyLength:
    """A step at all lengths.

    Attributes:
        traced: one traced call for each length, until the calls suffice.
        formula: the graph at all lengths, if there is one.
        sample_entry: the entry of one length; the formula gives its graph.
        holds: returns whether the formula holds for a length.
        is_known: whether the search for a formula has ended, with or without one.
    """

    traced: list[_TracedCall] = field(default_factory=list)
    formula: _Formula | None = None
    sample_entry: Entry | None = None
    holds: Callable[[int], bool] = field(default=lambda length: False)
    is_known: bool = False

    def learn(self, length: int, key: Key, entry: Entry, options: JitOptions, arguments: Arguments) -> None:
        """Record a traced call. From the third on, all ranks agree on whether further lengths need a trace.

        Args:
            length: the call's length.
            key: the key of the call's entry.
            entry: the trace.
            options: the options of `fzero.jit`.
            arguments: the flattened arguments of a call of any of these lengths.

        Raises:
            RuntimeError: if one rank traces and another does not.
        """
        if self.is_known or length in [call.length for call in self.traced]:
            return
        self.traced.append(_TracedCall(length, key, entry))
        if len(self.traced) >= _SAMPLES:
            self._find(options, arguments)

    def entry(self, options: JitOptions, length: int, arguments: Arguments) -> Entry | None:
        """Return the entry of a call without a trace; None if it needs one.

        Args:
            options: the options of `fzero.jit`.
            length: the call's length.
            arguments: the call's flattened arguments.
        """
        if self.formula is None or self.sample_entry is None:
            return None
        if not self.holds(length):
            _log.info(
                "%s: the step decides otherwise for length %d than for others, so this length is traced",
                options,
                length,
            )
            return None
        with pause_collector():
            graph = self.formula.at(length)
        inputs = [x for n in graph.nodes if is_input(n) for x in stand_ins_of(n)]
        sizes = [(tuple(x.shape), x.stride()) for x in arguments.tensors]
        if sizes != [(tuple(x.shape), x.stride()) for x in inputs[: len(sizes)]]:
            return None
        best = Candidate(
            self.sample_entry.best.pass_settings, graph, peak_bytes(graph), estimate_seconds(graph, options.hardware)
        )
        return replace(self.sample_entry, best=best, rejected=[], executable=None, is_traced=False)

    def _find(self, options: JitOptions, arguments: Arguments) -> None:
        """Find the formula and the lengths for which it holds; keep them if all ranks find one."""
        result: tuple[_Formula, Callable[[int], bool], Entry] | None = None
        groups = [[x for x in self.traced if x.structure == first.structure] for first in self.traced]
        try:
            result, reason = _formula_and_lengths(max(groups, key=len), options, arguments), ""
            if result is None:
                reason = _NEEDS_MORE if len(self.traced) < _MAX_TRACES else "its graphs differ by more than sizes"
        except _torch.FixedSizeError as error:
            reason = str(error)
        mesh = options.step.mesh
        if mesh is not None and mesh.distributed:
            reasons = gather_values(reason, mesh, options.step.name)
            reason = next((f"{text} (on rank {rank})" for rank, text in enumerate(reasons) if text), "")
        self.is_known = _NEEDS_MORE not in reason
        if not reason and result is not None:
            self.formula, self.holds, self.sample_entry = result
            _log.info("%s: further lengths need no trace, unless the step decides otherwise for them", options)
        elif self.is_known:
            _log.info("%s: each length is traced by itself: %s", options, reason)
        else:
            _log.info("%s: the next length is traced: %s", options, reason)
        if self.is_known:
            self.traced.clear()


def _formula_and_lengths(
    alike: Sequence[_TracedCall], options: JitOptions, arguments: Arguments
) -> tuple[_Formula, Callable[[int], bool], Entry] | None:
    """Return a formula, a function that says whether it holds for a length, and an entry of one length.

    Returns:
        None if further lengths must be traced first.

    Raises:
        FixedSizeError: if there is no formula.
    """
    # the latest: all earlier ones may take another branch
    sample = next((x for x in reversed(alike) if x.length > 1), None)
    if len(alike) < _SAMPLES or sample is None:
        return None
    holds = _record_decisions(options, sample, next(x for x in alike if x is not sample), arguments)
    alike = [x for x in alike if holds(x.length)]
    return (_formula(alike), holds, sample.entry) if len(alike) >= _SAMPLES else None


def differ_in_sizes(key: Key, other: Key) -> bool:
    """Return whether two calls differ only in sizes and strides."""

    def rest(key: Key) -> Key:
        tensors = tuple([(len(shape), dtype, device, grad) for shape, dtype, _, device, grad in key.tensors])
        return key._replace(tensors=tensors)

    return rest(key) == rest(other)


def _formula(traced: Sequence[_TracedCall]) -> _Formula:
    first, *rest = [x.entry.traced.constants for x in traced]
    if not all(_are_equal(first, other) for other in rest):
        raise _torch.FixedSizeError("the step captures another tensor at another length")
    formula = _fit_formula([(x.length, x.entry.best.graph) for x in traced])
    if formula is None:
        raise _torch.FixedSizeError("an integer in its graph is not a polynomial of the length")
    return formula


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two traces captured the same constants: the same objects, or tensors of equal values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)

    return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))


def _record_decisions(
    options: JitOptions, sample: _TracedCall, other: _TracedCall, arguments: Arguments
) -> Callable[[int], bool]:
    """Record the decisions that one rank's step takes by the length.

    Args:
        options: the options of `fzero.jit`.
        sample: the length at which the step runs. It was traced, so the step's own caches are filled already.
        other: another length: the sizes that differ between the two are symbolic.
        arguments: the flattened arguments of a call of any of these lengths.

    Returns:
        A function that says whether the step decides the same for a length.

    Raises:
        FixedSizeError: if the decisions cannot be recorded.
    """
    devices = {x.device for x in arguments.tensors if not x.is_meta} or {torch.device("cpu")}
    if len(devices) > 1:
        raise _torch.FixedSizeError("its arguments lie on several devices")
    mesh, step = options.step.mesh, options.step
    now, then = [_arguments_of_one_rank(arguments.rebuild(_metas(x.key)), mesh) for x in (sample, other)]
    if mesh is not None:
        coordinates = () if mesh.simulated else zip(mesh.axis_names, mesh.coordinates(mesh.rank), strict=True)
        step = step.on_mesh(planned_mesh(mesh.shape, tuple(coordinates)))

    def run(*tensors: torch.Tensor) -> None:
        args, kwargs = now.rebuild(tensors)
        step(*args, **kwargs)

    is_full_graph = options.backend == "inductor-whole"
    with _torch.TRACING, record_loops(options.loop and not is_full_graph, pipelines=not is_full_graph):
        dims = _changed_dims(shapes_of(then.tensors), shapes_of(now.tensors))
        return _torch.decisions(run, now.tensors, dims, devices.pop())


def _metas(key: Key) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, dtype, strides, *_ in key.tensors
    ]


def _arguments_of_one_rank(call: tuple[tuple[Any, ...], dict[str, Any]], mesh: Mesh | None) -> Arguments:
    if mesh is not None:
        call = one_rank_tree(call, dict(mesh.shape), all_ranks=mesh.simulated)
    return flatten_arguments(*call)


def _changed_dims(before: Shapes, now: Shapes) -> list[tuple[int, int]]:
    both = zip(before, now, strict=True)
    return [(i, d) for i, (s, t) in enumerate(both) for d, (a, b) in enumerate(zip(s, t, strict=True)) if a != b]
