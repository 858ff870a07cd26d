"""Lengths: a segment that comes again with a batch of another length runs by code that serves all lengths.

From the second length on, a segment is compared with those of the lengths before. Where the two are alike but for
numbers, and each number is a polynomial of the length, the segment is compiled once with the length as an argument.

Nothing is guessed: code is used only for a segment whose numbers are just those that its polynomials give. Where two
lengths were planned before the first call, segments are compiled for all lengths at once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from fzero.graph._polynomials import Sample, Shapes, fit_all
from fzero.graph.run._compile import Code, CompileError, Runs, compile_all, is_compiled, name_of_code, progress
from fzero.graph.run._compiled import codes_of
from fzero.graph.run._fallback import Refusal, all_refusals, prove
from fzero.graph.run._program import arriving, program_of
from fzero.graph.run._segment import Template, compile_template, numbers_of, structure_of
from fzero.graph.run._workers import helpers, start
from fzero.ranks import Mesh

__all__ = ["Lengths", "for_all_lengths"]


@dataclass
class Lengths:
    """What is known of a step's segments at the lengths that were compiled so far.

    Attributes:
        first: the shapes of the first call's arguments.
        places: which of their sizes change with the length; None until a second length.
        start: the first length.
        waiting: the segments of the first call, until its length is known.
        planned: the graphs of calls that have not run, with the shapes of their arguments.
        samples: by structure, the numbers of segments, each at a length.
        refused: the names of templates, and of segments of one length, that cannot run compiled on some rank.
        compiled: by structure, templates with their functions, and what says for which lengths these hold.
    """

    first: Shapes | None = None
    places: frozenset[tuple[int, int]] | None = None
    start: int = 0
    waiting: list[Code] = field(default_factory=list)
    planned: list[tuple[Shapes, Graph]] = field(default_factory=list)
    samples: dict[Hashable, list[Sample]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    compiled: dict[Hashable, list[tuple[Template, Runs, Callable[[int], bool]]]] = field(default_factory=dict)

    def length_of(self, shapes: Shapes) -> int | None:
        """Return the length of a call; None before a second is known, or if more than one size changes."""
        if self.first is None:
            self.first = shapes
        if shapes == self.first and self.places is not None:
            return self.start
        if [len(s) for s in shapes] != [len(s) for s in self.first]:
            return None
        both = [
            (i, d, a, b) for i, (s, t) in enumerate(zip(self.first, shapes, strict=True)) for d, (a, b) in _sizes(s, t)
        ]
        changed = [(i, d, a, b) for i, d, a, b in both if a != b]
        places, pairs = frozenset((i, d) for i, d, *_ in changed), {(a, b) for *_, a, b in changed}
        if len(pairs) != 1 or (self.places is not None and places != self.places):
            return None
        ((before, now),) = pairs
        if self.places is None:
            self.places, self.start = places, before
            self._note(self.waiting, before)
            self.waiting.clear()
        return now

    def template_of(self, code: Code, length: int) -> Template | None:
        """Return a template that is a segment at this length: a compiled one if there is one, else a new one."""
        structure, numbers = structure_of(code), numbers_of(code)
        compiled = self.compiled.get(structure, [])
        for template, _, holds in compiled:
            if template.is_at(numbers, length) and holds(length):
                return template
        tried = self.refused | {template.name for template, *_ in compiled}  # these hold for other lengths only
        known = [s for s in self.samples.get(structure, ()) if s.length != length]
        for sample in known:
            others = [s for s in known if s.length != sample.length]
            found = fit_all([sample, Sample(length, numbers), *others[:1]]) or fit_all(
                [sample, Sample(length, numbers)]
            )
            name = name_of_code((structure, found))
            if found is not None and length > 1 and name not in tried:
                return Template(code, length, found, name)
        return None

    def runs_of(self, template: Template) -> Runs | None:
        """Return the compiled function of a template, if it was compiled here."""
        known = self.compiled.get(structure_of(template.code), ())
        return next((runs for other, runs, _ in known if other.name == template.name), None)

    def keep(self, template: Template, runs: Runs, holds: Callable[[int], bool]) -> None:
        """Keep the function of a template for the lengths to come."""
        self.compiled.setdefault(structure_of(template.code), []).append((template, runs, holds))

    def learn_planned(self, shapes: Shapes) -> None:
        """Note the segments of calls that were planned, and have not run, but for that of these shapes."""
        for others, graph in self.planned:
            if others != shapes and (length := self.length_of(others)) is not None:
                self._note(codes_of(program_of(arriving(graph))), length)
        self.planned.clear()

    def learn(self, codes: Sequence[Code], length: int | None) -> None:
        """Note the segments of a call."""
        if length is None:
            self.waiting += [] if self.places is not None else codes
        else:
            self._note(codes, length)

    def _note(self, codes: Sequence[Code], length: int) -> None:
        for code in codes:
            samples = self.samples.setdefault(structure_of(code), [])
            sample = Sample(length, numbers_of(code))
            if sample not in samples and len(samples) < 8:
                samples.append(sample)


def _sizes(s: Sequence[int], t: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(s, t, strict=True))


def for_all_lengths(codes: Sequence[Code], lengths: Lengths, shapes: Shapes, mesh: Mesh | None) -> dict[str, Runs]:
    """Make functions of those segments that run by code for all lengths; it is compiled if it is not there.

    Args:
        codes: the distinct segments of a step at one length.
        lengths: what is known of other lengths. It learns this one.
        shapes: of the call's arguments.
        mesh: whose ranks do the same: what one cannot compile, all compile for the one length.

    Returns:
        Functions by the name of the code.
    """
    lengths.learn_planned(shapes)
    length = lengths.length_of(shapes)
    if length is None:
        lengths.learn(codes, None)
        return {}
    templates = {code.name: found for code in codes if (found := lengths.template_of(code, length))}
    todo = {t.name: t for t in templates.values() if lengths.runs_of(t) is None}

    def one(code: Code) -> tuple[Runs, Callable[[int], bool]] | Refusal:
        try:
            runs, holds = compile_template(todo[code.name])
            prove(code, bound(runs, length))
        except CompileError as error:
            return Refusal(error.segment, error.reason, "")
        return runs, holds

    asked = [t.code._replace(name=t.name) for t in todo.values()]
    cold = [code for code in asked if not is_compiled(code)]
    workers = start(cold, helpers(cold), templates=todo)
    try:
        outcomes = {code.name: found for code, found in progress(compile_all(asked, one), len(asked))}
    finally:
        workers.stop()
    refusals = all_refusals({name: x for name, x in outcomes.items() if isinstance(x, Refusal)}, mesh)
    lengths.refused.update(refusals)
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Refusal) and name not in refusals:
            lengths.keep(todo[name], *outcome)
    lengths.learn(codes, length)
    found = {name: lengths.runs_of(template) for name, template in templates.items()}
    return {name: bound(runs, length) for name, runs in found.items() if runs is not None}


def bound(runs: Runs, length: int) -> Runs:
    """Make the function of a segment at one length."""

    def at_length(args: list[Any]) -> Sequence[Any]:
        args.insert(0, length)
        return runs(args)

    return at_length
