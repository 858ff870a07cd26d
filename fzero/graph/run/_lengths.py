"""Lengths: a segment that recurs with batches of other lengths runs code that serves all lengths.

From the second length on, a segment is compared with the segments of earlier lengths. If two differ only in integers,
and each integer is a polynomial of the length, the segment is compiled once with the length as an argument.

Nothing is guessed: the code serves a segment only if its polynomials give exactly the segment's integers. If two
lengths were planned before the first call, segments are compiled for all lengths at once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from fzero.graph._polynomials import Sample, Shapes, fit_all
from fzero.graph.run._executable import distinct_segments
from fzero.graph.run._fallback import Refusal, all_refusals, check_outputs
from fzero.graph.run._program import make_copies_async, make_program
from fzero.graph.run._segment_compiler import (
    Code,
    CompileError,
    GraphFunction,
    compile_all,
    is_compiled,
    progress,
    segment_name,
)
from fzero.graph.run._template import Template, compile_template, segment_integers, segment_structure
from fzero.graph.run._workers import start_workers, worker_count
from fzero.ranks import Mesh

__all__ = ["Lengths", "for_all_lengths"]

_MAX_SAMPLES = 8  # lengths at which the integers of a segment are kept


@dataclass
class Lengths:
    """The segments of a step at the lengths that were compiled so far.

    Attributes:
        first: the shapes of the first call's arguments.
        dims: the sizes, `(tensor, dimension)`, that change with the length; None until a second length.
        first_length: the length of the first call; 0 until a second length.
        first_codes: the segments of the first call, until its length is known.
        planned_graphs: the graphs of planned calls that have not run, with the shapes of their arguments.
        samples: by structure, the integers of segments, each at a length.
        refused_names: the names of templates, and of segments of one length, that cannot run compiled on some rank.
        templates: by structure, each compiled template, its function, and a function that says whether it holds for a
            length.
    """

    first: Shapes | None = None
    dims: frozenset[tuple[int, int]] | None = None
    first_length: int = 0
    first_codes: list[Code] = field(default_factory=list)
    planned_graphs: list[tuple[Shapes, Graph]] = field(default_factory=list)
    samples: dict[Hashable, list[Sample]] = field(default_factory=dict)
    refused_names: set[str] = field(default_factory=set)
    templates: dict[Hashable, list[tuple[Template, GraphFunction, Callable[[int], bool]]]] = field(default_factory=dict)

    def call_length(self, shapes: Shapes) -> int | None:
        """Return the length of a call; None before a second length is known, or if more than one size changes."""
        if self.first is None:
            self.first = shapes
        if shapes == self.first and self.dims is not None:
            return self.first_length
        if [len(s) for s in shapes] != [len(s) for s in self.first]:
            return None
        size_pairs = [
            (i, d, a, b)
            for i, (s, t) in enumerate(zip(self.first, shapes, strict=True))
            for d, (a, b) in _size_pairs(s, t)
        ]
        changes = [(i, d, a, b) for i, d, a, b in size_pairs if a != b]
        dims, pairs = frozenset((i, d) for i, d, *_ in changes), {(a, b) for *_, a, b in changes}
        if len(pairs) != 1 or (self.dims is not None and dims != self.dims):
            return None
        ((before, now),) = pairs
        if self.dims is None:
            self.dims, self.first_length = dims, before
            self._record_segments(self.first_codes, before)
            self.first_codes.clear()
        return now

    def choose_template(self, code: Code, length: int) -> Template | None:
        """Return a template of a segment at this length: a compiled template if one fits, else a new one, else None."""
        structure, numbers = segment_structure(code), segment_integers(code)
        candidates = self.templates.get(structure, [])
        for template, _, holds in candidates:
            if template.is_at(numbers, length) and holds(length):
                return template
        # the compiled ones hold for other lengths only
        tried = self.refused_names | {template.name for template, *_ in candidates}
        samples = [s for s in self.samples.get(structure, ()) if s.length != length]
        for sample in samples:
            rest = [s for s in samples if s.length != sample.length]
            polynomials = fit_all([sample, Sample(length, numbers), *rest[:1]]) or fit_all(
                [sample, Sample(length, numbers)]
            )
            name = segment_name((structure, polynomials))
            if polynomials is not None and length > 1 and name not in tried:
                return Template(code, length, polynomials, name)
        return None

    def compiled_function(self, template: Template) -> GraphFunction | None:
        """Return the function of a template if it is compiled, else None."""
        entries = self.templates.get(segment_structure(template.code), ())
        return next((function for other, function, _ in entries if other.name == template.name), None)

    def add(self, template: Template, function: GraphFunction, holds: Callable[[int], bool]) -> None:
        """Keep the function of a template for further lengths."""
        self.templates.setdefault(segment_structure(template.code), []).append((template, function, holds))

    def learn_planned(self, shapes: Shapes) -> None:
        """Record the segments of planned calls that have not run, except the call with these shapes."""
        for other_shapes, graph in self.planned_graphs:
            if other_shapes != shapes and (length := self.call_length(other_shapes)) is not None:
                self._record_segments(distinct_segments(make_program(make_copies_async(graph))), length)
        self.planned_graphs.clear()

    def learn(self, codes: Sequence[Code], length: int | None) -> None:
        """Record the segments of a call."""
        if length is not None:
            self._record_segments(codes, length)
        elif self.dims is None:
            self.first_codes += codes

    def _record_segments(self, codes: Sequence[Code], length: int) -> None:
        for code in codes:
            samples = self.samples.setdefault(segment_structure(code), [])
            sample = Sample(length, segment_integers(code))
            if sample not in samples and len(samples) < _MAX_SAMPLES:
                samples.append(sample)


def _size_pairs(s: Sequence[int], t: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(s, t, strict=True))


def for_all_lengths(
    codes: Sequence[Code], lengths: Lengths, shapes: Shapes, mesh: Mesh | None
) -> dict[str, GraphFunction]:
    """Return functions of the segments whose code serves several lengths. Compile missing code.

    Args:
        codes: the distinct segments of a step at one length.
        lengths: the segments of other lengths. This length is added.
        shapes: the shapes of the call's arguments.
        mesh: the mesh whose ranks make the same call. A template that one rank cannot compile, no rank uses.

    Returns:
        Functions by the name of the code.
    """
    lengths.learn_planned(shapes)
    length = lengths.call_length(shapes)
    if length is None:
        lengths.learn(codes, None)
        return {}
    templates = {code.name: template for code in codes if (template := lengths.choose_template(code, length))}
    todo = {t.name: t for t in templates.values() if lengths.compiled_function(t) is None}

    def compile_one(code: Code) -> tuple[GraphFunction, Callable[[int], bool]] | Refusal:
        try:
            function, holds_for = compile_template(todo[code.name])
            check_outputs(code, _bind_length(function, length))
        except CompileError as error:
            return Refusal(error.segment, error.reason, "")
        return function, holds_for

    missing_codes = [t.code._replace(name=t.name) for t in todo.values()]
    cold = [code for code in missing_codes if not is_compiled(code)]
    workers = start_workers(cold, worker_count(cold), templates=todo)
    try:
        outcomes = {
            code.name: outcome
            for code, outcome in progress(compile_all(missing_codes, compile_one), len(missing_codes))
        }
    finally:
        workers.stop()
    refusals = all_refusals({name: x for name, x in outcomes.items() if isinstance(x, Refusal)}, mesh)
    lengths.refused_names.update(refusals)
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Refusal) and name not in refusals:
            lengths.add(todo[name], *outcome)
    lengths.learn(codes, length)
    functions = {name: lengths.compiled_function(template) for name, template in templates.items()}
    return {name: _bind_length(function, length) for name, function in functions.items() if function is not None}


def _bind_length(function: GraphFunction, length: int) -> GraphFunction:
    """Bind the function of a template to one length."""

    def at_length(args: list[Any]) -> Sequence[Any]:
        args.insert(0, length)
        return function(args)

    return at_length
