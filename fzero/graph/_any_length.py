"""Graphs for batch lengths that were not traced: the graphs of three lengths determine those of all others.

Tracing is most of the cost of a new length. But a new length may take another branch in Python, or its sizes may
depend on the length in another way. So the step runs once more, on stand-ins with a symbolic length, to record which
decisions depend on the length (`fzero._torch.decisions`). Sizes must be polynomials of the length of degree at most 2,
which three lengths determine. A length that changes the outcome of a decision is traced.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fzero import _torch
from fzero.graph._candidates import Candidate
from fzero.graph._collector import pause_collector
from fzero.graph._entry import Entry, JitOptions
from fzero.graph._length_formula import SAMPLES, LengthFormula, fit_formula, graph_structure
from fzero.graph._one_rank import one_rank_tree, planned_mesh
from fzero.graph._polynomials import Shapes, argument_shapes
from fzero.graph._trace_agreement import gather_values
from fzero.graph.ir import is_input, node_stand_ins
from fzero.graph.loop import record_loops
from fzero.graph.planning import estimate_seconds, peak_bytes
from fzero.graph.trace import Arguments, Key, flatten_arguments
from fzero.ranks import Mesh

__all__ = ["AnyLength", "differ_in_sizes"]


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
        return graph_structure(e.best.graph), donation, tuple(e.passthrough), e.structure


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
    formula: LengthFormula | None = None
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
        if len(self.traced) >= SAMPLES:
            self._find_formula(options, arguments)

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
        inputs = [x for n in graph.nodes if is_input(n) for x in node_stand_ins(n)]
        sizes = [(tuple(x.shape), x.stride()) for x in arguments.tensors]
        if sizes != [(tuple(x.shape), x.stride()) for x in inputs[: len(sizes)]]:
            return None
        best = Candidate(
            self.sample_entry.best.pass_settings, graph, peak_bytes(graph), estimate_seconds(graph, options.hardware)
        )
        return replace(self.sample_entry, best=best, rejected=[], executable=None, is_traced=False)

    def _find_formula(self, options: JitOptions, arguments: Arguments) -> None:
        """Find the formula and the lengths for which it holds; keep them if all ranks find one."""
        result: tuple[LengthFormula, Callable[[int], bool], Entry] | None = None
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
    calls: Sequence[_TracedCall], options: JitOptions, arguments: Arguments
) -> tuple[LengthFormula, Callable[[int], bool], Entry] | None:
    """Return a formula, a function that says whether it holds for a length, and an entry of one length.

    Returns:
        None if further lengths must be traced first.

    Raises:
        FixedSizeError: if there is no formula.
    """
    # the latest: all earlier ones may take another branch
    sample = next((x for x in reversed(calls) if x.length > 1), None)
    if len(calls) < SAMPLES or sample is None:
        return None
    holds = _record_decisions(options, sample, next(x for x in calls if x is not sample), arguments)
    calls = [x for x in calls if holds(x.length)]
    return (_fit_calls(calls), holds, sample.entry) if len(calls) >= SAMPLES else None


def differ_in_sizes(key: Key, other_key: Key) -> bool:
    """Return whether two calls differ only in sizes and strides."""

    def rest(key: Key) -> Key:
        tensors = tuple([(len(shape), dtype, device, grad) for shape, dtype, _, device, grad in key.tensors])
        return key._replace(tensors=tensors)

    return rest(key) == rest(other_key)


def _fit_calls(traced: Sequence[_TracedCall]) -> LengthFormula:
    first, *rest = [x.entry.traced.constants for x in traced]
    if not all(_are_equal(first, other) for other in rest):
        raise _torch.FixedSizeError("the step captures another tensor at another length")
    formula = fit_formula([(x.length, x.entry.best.graph) for x in traced])
    if formula is None:
        raise _torch.FixedSizeError("an integer in its graph is not a polynomial of the length")
    return formula


def _are_equal(values: Sequence[Any], other_values: Sequence[Any]) -> bool:
    """Return whether two traces captured the same constants: the same objects, or tensors of equal values."""

    def equal(a: Any, b: Any) -> bool:
        if a is b:
            return True
        are_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return are_tensors and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)

    return len(values) == len(other_values) and all(equal(a, b) for a, b in zip(values, other_values, strict=True))


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
    sample_call, other_call = [
        _one_rank_arguments(arguments.rebuild(_meta_tensors(x.key)), mesh) for x in (sample, other)
    ]
    if mesh is not None:
        coordinates = () if mesh.simulated else zip(mesh.axis_names, mesh.coordinates(mesh.rank), strict=True)
        step = step.on_mesh(planned_mesh(mesh.shape, tuple(coordinates)))

    def run(*tensors: torch.Tensor) -> None:
        args, kwargs = sample_call.rebuild(tensors)
        step(*args, **kwargs)

    is_full_graph = options.backend == "inductor-whole"
    with _torch.TRACING, record_loops(options.loop and not is_full_graph, pipelines=not is_full_graph):
        dims = _changed_dims(argument_shapes(other_call.tensors), argument_shapes(sample_call.tensors))
        return _torch.decisions(run, sample_call.tensors, dims, devices.pop())


def _meta_tensors(key: Key) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, dtype, strides, *_ in key.tensors
    ]


def _one_rank_arguments(call: tuple[tuple[Any, ...], dict[str, Any]], mesh: Mesh | None) -> Arguments:
    if mesh is not None:
        call = one_rank_tree(call, dict(mesh.shape), all_ranks=mesh.simulated)
    return flatten_arguments(*call)


def _changed_dims(before: Shapes, after: Shapes) -> list[tuple[int, int]]:
    pairs = zip(before, after, strict=True)
    return [(i, d) for i, (s, t) in enumerate(pairs) for d, (a, b) in enumerate(zip(s, t, strict=True)) if a != b]
