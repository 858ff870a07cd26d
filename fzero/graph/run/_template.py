"""Templates: segments whose integers are polynomials of a length, compiled with the length as an argument."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fzero._torch import TensorMetadata, inductor_for_lengths
from fzero.graph._polynomials import Polynomial, integers_in, map_integers
from fzero.graph.ir import is_input
from fzero.graph.run._segment_compiler import Code, GraphFunction, compile_error, mark_compiled

__all__ = ["Template", "compile_template", "segment_integers", "segment_structure"]


class Template(NamedTuple):
    """A segment for all lengths.

    Attributes:
        code: the segment as traced at one length.
        length: that length.
        numbers: polynomials for all integers of the segment, in order.
        name: the name of its files.
    """

    code: Code
    length: int
    numbers: tuple[Polynomial, ...]
    name: str

    def is_at(self, numbers: Sequence[int], length: int) -> bool:
        """Return whether a segment of the same structure, with these integers, is the template at a length."""
        return all(p.at(length) == n for p, n in zip(self.numbers, numbers, strict=True))


def compile_template(template: Template) -> tuple[GraphFunction, Callable[[int], bool]]:
    """Compile a segment for all lengths.

    Returns:
        A function of a list of the length and the segment's arguments, and a function that says whether the code holds
        for a length.

    Raises:
        CompileError: if Inductor cannot compile the segment.
    """
    code = template.code
    nodes = [n for n in code.graph.nodes if n.op == "call_function"]

    def arguments(length: Any) -> Mapping[str, tuple[Any, Any]]:
        numbers = iter(template.numbers)
        return {n.name: map_integers((n.args, n.kwargs), lambda _: next(numbers).at(length)) for n in nodes}

    count = sum(len(integers_in((n.args, n.kwargs))) for n in nodes)

    def metadata(length: Any) -> tuple[list[TensorMetadata], list[TensorMetadata]]:
        numbers = iter(template.numbers[count:])

        def tensor_metadata(x: torch.Tensor) -> TensorMetadata:
            shape, strides = map_integers((tuple(x.shape), x.stride()), lambda _: next(numbers).at(length))
            return shape, strides, x.dtype, x.device

        return [tensor_metadata(x) for x in code.stand_ins], [tensor_metadata(x) for x in code.outputs]

    with compile_error(code.graph, code.location):
        functions = inductor_for_lengths(GraphModule({}, code.graph), arguments, metadata, template.length)
    mark_compiled(code._replace(name=template.name))
    return functions


def segment_structure(code: Code) -> Hashable:
    """Describe a segment without its integers."""
    index = {n: i for i, n in enumerate(code.graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return "input"
        return str(n.target), repr(map_integers((n.args, n.kwargs), lambda _: "#", lambda a: f"%{index[a]}"))

    values = [(x.dim(), x.dtype, x.device) for x in (*code.stand_ins, *code.outputs)]
    return tuple([line(n) for n in code.graph.nodes]), tuple(values), len(code.stand_ins)


def segment_integers(code: Code) -> tuple[int, ...]:
    """List the integers of a segment: those of its nodes' arguments, then the shapes and strides of its values."""
    numbers = [i for n in code.graph.nodes if n.op == "call_function" for i in integers_in((n.args, n.kwargs))]
    for x in (*code.stand_ins, *code.outputs):
        numbers += [*x.shape, *x.stride()]
    return tuple(numbers)
