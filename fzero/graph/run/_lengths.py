"""Lengths: a segment that is traced again for a batch of another length runs by code that serves all lengths.

From the second length on, a segment is compared with those of the lengths before. Where the two are alike but for
numbers, and each number is a polynomial of the length, the segment is compiled once with the length as an argument.

Each later length is traced by itself, so nothing is guessed: code is used only for a segment whose numbers are just
those that its polynomials give.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fzero._torch import Form, inductor_for_lengths
from fzero.graph.ir import is_input
from fzero.graph.run._compile import Code, CompileError, Runs, compile_all, compile_error, name_of_code
from fzero.graph.run._fallback import Refusal, all_refusals, prove
from fzero.graph.run._progress import progress
from fzero.ranks.mesh import Mesh

__all__ = ["Lengths", "Shapes", "for_all_lengths", "shapes_of"]

Shapes = tuple[tuple[int, ...], ...]


def shapes_of(tensors: Sequence[torch.Tensor]) -> Shapes:
    """Return the shapes of a call's arguments."""
    return tuple([tuple(x.shape) for x in tensors])


class Polynomial(NamedTuple):
    """A whole number that follows from a length: `constant + linear * length + square * length**2`."""

    constant: int
    linear: int = 0
    square: int = 0

    def at(self, length: Any) -> Any:
        """Return the number at a length, which may be symbolic."""
        if not self.linear and not self.square:
            return self.constant
        found = self.linear * length if self.linear else 0
        found = found + self.square * length * length if self.square else found
        return found + self.constant if self.constant else found


class Template(NamedTuple):
    """A segment for all lengths.

    Attributes:
        code: as it was traced at one length.
        length: which.
        numbers: all whole numbers in it, in order.
        name: of its files.
    """

    code: Code
    length: int
    numbers: tuple[Polynomial, ...]
    name: str

    def is_at(self, numbers: Sequence[int], length: int) -> bool:
        """Return whether a segment of the same structure is this one at a length."""
        return all(p.at(length) == n for p, n in zip(self.numbers, numbers, strict=True))


class _Sample(NamedTuple):
    length: int
    numbers: tuple[int, ...]


@dataclass
class Lengths:
    """What is known of a step's segments at the lengths that were compiled so far.

    Attributes:
        first: the shapes of the first call's arguments.
        places: which of their sizes change with the length; None until a second length.
        start: the first length.
        waiting: the segments of the first call, until its length is known.
        samples: by structure, the numbers of segments, each at a length.
        refused: the names of templates that could not be compiled.
        compiled: by structure, templates with their functions, and what says for which lengths these hold.
    """

    first: Shapes | None = None
    places: frozenset[tuple[int, int]] | None = None
    start: int = 0
    waiting: list[Code] = field(default_factory=list)
    samples: dict[Hashable, list[_Sample]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    compiled: dict[Hashable, list[tuple[Template, Runs, Callable[[int], bool]]]] = field(default_factory=dict)

    def length_of(self, shapes: Shapes) -> int | None:
        """Return the length of a call; None if it is the first, or differs in more than one length from the first."""
        if self.first is None:
            self.first = shapes
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
        structure, numbers = _structure(code), _numbers(code)
        compiled = self.compiled.get(structure, [])
        for template, _, holds in compiled:
            if template.is_at(numbers, length) and holds(length):
                return template
        tried = self.refused | {template.name for template, *_ in compiled}  # these hold for other lengths only
        known = [s for s in self.samples.get(structure, ()) if s.length != length]
        for sample in known:
            others = [s for s in known if s.length != sample.length]
            found = _fitted([sample, _Sample(length, numbers), *others[:1]]) or _fitted(
                [sample, _Sample(length, numbers)]
            )
            name = name_of_code((structure, found))
            if found is not None and length > 1 and name not in tried:
                return Template(code, length, found, name)
        return None

    def runs_of(self, template: Template) -> Runs | None:
        """Return the compiled function of a template, if it was compiled here."""
        known = self.compiled.get(_structure(template.code), ())
        return next((runs for other, runs, _ in known if other.name == template.name), None)

    def keep(self, template: Template, runs: Runs, holds: Callable[[int], bool]) -> None:
        """Keep the function of a template for the lengths to come."""
        self.compiled.setdefault(_structure(template.code), []).append((template, runs, holds))

    def learn(self, codes: Sequence[Code], length: int | None) -> None:
        """Note the segments of a call."""
        if length is None:
            self.waiting += [] if self.places is not None else codes
        else:
            self._note(codes, length)

    def _note(self, codes: Sequence[Code], length: int) -> None:
        for code in codes:
            samples = self.samples.setdefault(_structure(code), [])
            sample = _Sample(length, _numbers(code))
            if sample not in samples and len(samples) < 8:
                samples.append(sample)


def _sizes(s: Sequence[int], t: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(s, t, strict=True))


def compile_template(template: Template) -> tuple[Runs, Callable[[int], bool]]:
    """Compile a segment for all lengths.

    Raises:
        CompileError: if Inductor cannot.
    """
    code = template.code
    nodes = [n for n in code.graph.nodes if n.op == "call_function"]

    def arguments(length: Any) -> Mapping[str, tuple[Any, Any]]:
        numbers = iter(template.numbers)
        return {n.name: _mapped((n.args, n.kwargs), lambda _: next(numbers).at(length)) for n in nodes}

    count = sum(len(_whole((n.args, n.kwargs))) for n in nodes)

    def forms(length: Any) -> tuple[list[Form], list[Form]]:
        numbers = iter(template.numbers[count:])

        def form(x: torch.Tensor) -> Form:
            shape, strides = _mapped((tuple(x.shape), x.stride()), lambda _: next(numbers).at(length))
            return shape, strides, x.dtype, x.device

        return [form(x) for x in code.fakes], [form(x) for x in code.made]

    with compile_error(code.graph, code.where):
        return inductor_for_lengths(GraphModule({}, code.graph), arguments, forms, template.length)


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
    outcomes = {code.name: found for code, found in progress(compile_all(asked, one), len(asked))}
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


# ---------------------------------------------------------------- the numbers of a segment


def _structure(code: Code) -> Hashable:
    """Describe a segment but for its whole numbers."""
    number = {n: i for i, n in enumerate(code.graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return "input"
        return str(n.target), repr(_mapped((n.args, n.kwargs), lambda _: "#", lambda a: f"%{number[a]}"))

    forms = [(x.dim(), x.dtype, x.device) for x in (*code.fakes, *code.made)]
    return tuple([line(n) for n in code.graph.nodes]), tuple(forms), len(code.fakes)


def _numbers(code: Code) -> tuple[int, ...]:
    """List the whole numbers of a segment: in its nodes' arguments, then in the shapes and strides of its borders."""
    found = [i for n in code.graph.nodes if n.op == "call_function" for i in _whole((n.args, n.kwargs))]
    for x in (*code.fakes, *code.made):
        found += [*x.shape, *x.stride()]
    return tuple(found)


def _whole(x: Any) -> list[int]:
    found: list[int] = []
    _mapped(x, found.append)
    return found


def _mapped(x: Any, f: Callable[[int], Any], g: Callable[[Node], Any] = lambda node: node) -> Any:
    """Apply `f` to the whole numbers in the arguments of a node, and `g` to nodes."""
    if isinstance(x, Node):
        return g(x)
    if isinstance(x, list | tuple):
        return tuple([_mapped(y, f, g) for y in x]) if isinstance(x, tuple) else [_mapped(y, f, g) for y in x]
    if isinstance(x, dict):
        return {name: _mapped(y, f, g) for name, y in x.items()}
    if isinstance(x, slice):
        return slice(*[_mapped(y, f, g) for y in (x.start, x.stop, x.step)])
    return f(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _fitted(samples: Sequence[_Sample]) -> tuple[Polynomial, ...] | None:
    """Find polynomials of the length that give the numbers of all samples; None if a number is none."""
    lengths = [s.length for s in samples]
    found = [_fit(lengths, values) for values in zip(*[s.numbers for s in samples], strict=True)]
    return None if any(p is None for p in found) else tuple([p for p in found if p is not None])


def _fit(lengths: Sequence[int], values: Sequence[int]) -> Polynomial | None:
    """Find the simplest polynomial through some points: a constant, a multiple of the length or its square, a line."""
    (x, y, *_), (a, b, *_) = lengths, values
    tries = [Polynomial(a)]
    tries += [Polynomial(0, a // x)] if a % x == 0 else []
    tries += [Polynomial(0, 0, a // x**2)] if a % x**2 == 0 else []
    slope, rest = divmod(b - a, y - x)
    tries += [Polynomial(a - slope * x, slope)] if not rest else []
    if len(lengths) > 2 and not rest:
        z, c = lengths[2], values[2]
        curve, rest = divmod((c - a) * (y - x) - (b - a) * (z - x), (z - x) * (z - y) * (y - x))
        linear = slope - curve * (x + y)
        tries += [Polynomial(a - linear * x - curve * x * x, linear, curve)] if not rest else []
    return next((p for p in tries if all(p.at(n) == v for n, v in zip(lengths, values, strict=True))), None)
