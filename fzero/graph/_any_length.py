"""Calls of lengths that were not traced: from the fourth length of a batch on, a step's graph follows from three.

A trace is most of what another length costs. But at another length Python may take another branch, and a size may
follow from the length otherwise. So the step is run once more, on stand-ins whose length is a symbol, to see what it
decides by the length (`fzero._torch.decisions`). Its sizes must be polynomials of degree 2 at the most, which three
lengths determine. A length for which a decision has another outcome is traced.
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
from fzero.graph._agree import of_all_ranks
from fzero.graph._candidates import Candidate
from fzero.graph._collector import paused_collector
from fzero.graph._entry import Entry, JitOptions
from fzero.graph._ir import COMPILED, FUSED, LATE, copied, is_input, values
from fzero.graph._one_rank import absent, as_one_rank_holds
from fzero.graph._polynomials import Polynomial, Sample, Shapes, fit_all, mapped, shapes_of, whole_numbers
from fzero.graph.loop._scan import loop_of, recorded, with_body
from fzero.graph.planning._cost import seconds
from fzero.graph.planning._liveness import peak_bytes
from fzero.graph.trace._arguments import Arguments, Key, arguments_of
from fzero.ranks import Mesh

__all__ = ["SAMPLES", "AnyLength", "Formula", "differ_in_sizes", "formula_of", "structure_of"]

# Formula: a scheduled graph for all lengths of a batch, made of the graphs of some.
#
# Graphs that are alike but for whole numbers make one graph, whose numbers are polynomials of the length.


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


ENOUGH = 8  # traces, of which three are to be alike
MORE = "more lengths are to be traced"

log = logging.getLogger("fzero.jit")


@dataclass(frozen=True)
class _Traced:
    """A call that was traced, and its length."""

    length: int
    key: Key
    entry: Entry

    @cached_property
    def structure(self) -> Hashable:
        """The schedule but for its numbers. Small values are treated otherwise than large ones, so it may change."""
        e = self.entry
        into = tuple(e.into.items()), tuple(e.kept), tuple(e.donated.items()), tuple(e.written)
        return structure_of(e.chosen.graph), into, e.structure


@dataclass
class AnyLength:
    """A step at all lengths.

    Attributes:
        traced: the calls that were traced, of one length each, until there are enough.
        formula: the graph at all lengths, if there is one.
        like: an entry whose graph it is at one length.
        holds: for which lengths.
        is_known: whether it is known if there is one.
    """

    traced: list[_Traced] = field(default_factory=list)
    formula: Formula | None = None
    like: Entry | None = None
    holds: Callable[[int], bool] = field(default=lambda length: False)
    is_known: bool = False

    def learn(self, length: int, key: Key, entry: Entry, asked: JitOptions, arguments: Arguments) -> None:
        """Note a call that was traced. After the third and further ones all ranks agree on whether others need a trace.

        Args:
            length: of the call.
            key: what its trace is kept by.
            entry: the trace.
            asked: what `fzero.jit` was asked for.
            arguments: of any call of these lengths, taken apart.

        Raises:
            RuntimeError: if a rank traces, and another does not.
        """
        if self.is_known or length in [known.length for known in self.traced]:
            return
        self.traced.append(_Traced(length, key, entry))
        if len(self.traced) >= SAMPLES:
            self._find(asked, arguments)

    def entry(self, asked: JitOptions, length: int, arguments: Arguments) -> Entry | None:
        """Return the entry of a call without a trace; None if it needs one.

        Args:
            asked: what `fzero.jit` was asked for.
            length: of the call.
            arguments: of the call, taken apart.
        """
        if self.formula is None or self.like is None:
            return None
        if not self.holds(length):
            log.info("%s: the step decides otherwise for length %d than for others, so it is traced", asked, length)
            return None
        with paused_collector():
            graph = self.formula.at(length)
        inputs = [x for n in graph.nodes if is_input(n) for x in values(n)]
        forms = [(tuple(x.shape), x.stride()) for x in arguments.tensors]
        if forms != [(tuple(x.shape), x.stride()) for x in inputs[: len(forms)]]:
            return None
        chosen = Candidate(self.like.chosen.choice, graph, peak_bytes(graph), seconds(graph, asked.device))
        return replace(self.like, chosen=chosen, rejected=[], executable=None, is_traced=False)

    def _find(self, asked: JitOptions, arguments: Arguments) -> None:
        """Find the formula, and for which lengths it holds, if all ranks do."""
        found: tuple[Formula, Callable[[int], bool], Entry] | None = None
        groups = [[x for x in self.traced if x.structure == first.structure] for first in self.traced]
        try:
            found, why = _found(max(groups, key=len), asked, arguments), ""
            if found is None:
                why = MORE if len(self.traced) < ENOUGH else "its graphs differ by more than sizes"
        except _torch.FixedSizeError as error:
            why = str(error)
        mesh = asked.step.mesh
        if mesh is not None and mesh.distributed:
            reasons = of_all_ranks(why, mesh, asked.step.name)
            why = next((f"{reason} (on rank {rank})" for rank, reason in enumerate(reasons) if reason), "")
        self.is_known = MORE not in why
        if not why and found is not None:
            self.formula, self.holds, self.like = found
            log.info("%s: further lengths need no trace, where the step decides as for this one", asked)
        elif self.is_known:
            log.info("%s: each length is traced by itself: %s", asked, why)
        else:
            log.info("%s: the next length is traced: %s", asked, why)
        if self.is_known:
            self.traced.clear()


def _found(
    alike: Sequence[_Traced], asked: JitOptions, arguments: Arguments
) -> tuple[Formula, Callable[[int], bool], Entry] | None:
    """Return a formula, for which lengths it holds, and an entry of it; None if it takes more lengths.

    Raises:
        FixedSizeError: if there is none.
    """
    at = next((x for x in reversed(alike) if x.length > 1), None)  # the others may all be on another branch
    if len(alike) < SAMPLES or at is None:
        return None
    holds = _decisions(asked, at, next(x for x in alike if x is not at), arguments)
    alike = [x for x in alike if holds(x.length)]
    return (_formula(alike), holds, at.entry) if len(alike) >= SAMPLES else None


def differ_in_sizes(key: Key, other: Key) -> bool:
    """Return whether two calls are alike but for sizes and strides."""

    def rest(key: Key) -> Key:
        tensors = tuple([(len(shape), dtype, device, grad) for shape, dtype, _, device, grad in key.tensors])
        return key._replace(tensors=tensors)

    return rest(key) == rest(other)


def _formula(traced: Sequence[_Traced]) -> Formula:
    first, *others = [x.entry.traced.constants for x in traced]
    if not all(_are_equal(first, other) for other in others):
        raise _torch.FixedSizeError("the step captures another tensor at another length")
    found = formula_of([(x.length, x.entry.chosen.graph) for x in traced])
    if found is None:
        raise _torch.FixedSizeError("a number in its graph is no polynomial of the length")
    return found


def _are_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether traces have captured the same: the same objects, or tensors of the same values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)

    return len(some) == len(others) and all(equal(a, b) for a, b in zip(some, others, strict=True))


def _decisions(asked: JitOptions, at: _Traced, other: _Traced, arguments: Arguments) -> Callable[[int], bool]:
    """Find what the step decides by the length, as one rank runs it.

    Args:
        asked: what `fzero.jit` was asked for.
        at: the length at which it runs: one that was traced, so that what the step keeps by itself is there already.
        other: another length, which shows which sizes change.
        arguments: of any call of these lengths, taken apart.

    Raises:
        FixedSizeError: if that cannot be found.
    """
    devices = {x.device for x in arguments.tensors if not x.is_meta} or {torch.device("cpu")}
    if len(devices) > 1:
        raise _torch.FixedSizeError("its arguments lie on several devices")
    mesh, step = asked.step.mesh, asked.step
    now, then = [_of_one_rank(arguments.rebuild(_metas(x.key)), mesh) for x in (at, other)]
    if mesh is not None:
        places = () if mesh.simulated else zip(mesh.axis_names, mesh.coordinates(mesh.rank), strict=True)
        step = step._on(absent(mesh.shape, tuple(places)))

    def run(*tensors: torch.Tensor) -> None:
        given, named = now.rebuild(tensors)
        step(*given, **named)

    whole = asked.backend == "inductor-whole"
    with _torch.TRACING, recorded(asked.loop and not whole, pipelines=not whole):
        places = _changed(shapes_of(then.tensors), shapes_of(now.tensors))
        return _torch.decisions(run, now.tensors, places, devices.pop())


def _metas(key: Key) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, dtype, strides, *_ in key.tensors
    ]


def _of_one_rank(call: tuple[tuple[Any, ...], dict[str, Any]], mesh: Mesh | None) -> Arguments:
    if mesh is not None:
        call = as_one_rank_holds(call, dict(mesh.shape), stacked=mesh.simulated)
    return arguments_of(*call)


def _changed(before: Shapes, now: Shapes) -> list[tuple[int, int]]:
    both = zip(before, now, strict=True)
    return [(i, d) for i, (s, t) in enumerate(both) for d, (a, b) in enumerate(zip(s, t, strict=True)) if a != b]
