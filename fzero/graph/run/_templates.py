"""Templates: segments whose whole numbers are polynomials of a length, compiled with the length as an argument."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fzero._torch import Form, inductor_for_lengths
from fzero.graph.ir import is_input
from fzero.graph.polynomials import Polynomial, mapped, whole_numbers
from fzero.graph.run._compile import Code, Runs, compile_error, note_compiled

__all__ = ["Template", "compile_template", "numbers_of", "structure_of"]


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


def compile_template(template: Template) -> tuple[Runs, Callable[[int], bool]]:
    """Compile a segment for all lengths.

    Returns:
        A function of a list of the length and the segment's arguments, and one that says for which lengths it holds.

    Raises:
        CompileError: if Inductor cannot.
    """
    code = template.code
    nodes = [n for n in code.graph.nodes if n.op == "call_function"]

    def arguments(length: Any) -> Mapping[str, tuple[Any, Any]]:
        numbers = iter(template.numbers)
        return {n.name: mapped((n.args, n.kwargs), lambda _: next(numbers).at(length)) for n in nodes}

    count = sum(len(whole_numbers((n.args, n.kwargs))) for n in nodes)

    def forms(length: Any) -> tuple[list[Form], list[Form]]:
        numbers = iter(template.numbers[count:])

        def form(x: torch.Tensor) -> Form:
            shape, strides = mapped((tuple(x.shape), x.stride()), lambda _: next(numbers).at(length))
            return shape, strides, x.dtype, x.device

        return [form(x) for x in code.fakes], [form(x) for x in code.made]

    with compile_error(code.graph, code.where):
        found = inductor_for_lengths(GraphModule({}, code.graph), arguments, forms, template.length)
    note_compiled(code._replace(name=template.name))
    return found


# ---------------------------------------------------------------- the numbers of a segment


def structure_of(code: Code) -> Hashable:
    """Describe a segment but for its whole numbers."""
    number = {n: i for i, n in enumerate(code.graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return "input"
        return str(n.target), repr(mapped((n.args, n.kwargs), lambda _: "#", lambda a: f"%{number[a]}"))

    forms = [(x.dim(), x.dtype, x.device) for x in (*code.fakes, *code.made)]
    return tuple([line(n) for n in code.graph.nodes]), tuple(forms), len(code.fakes)


def numbers_of(code: Code) -> tuple[int, ...]:
    """List the whole numbers of a segment: in its nodes' arguments, then in the shapes and strides of its borders."""
    found = [i for n in code.graph.nodes if n.op == "call_function" for i in whole_numbers((n.args, n.kwargs))]
    for x in (*code.fakes, *code.made):
        found += [*x.shape, *x.stride()]
    return tuple(found)
