"""Segments: groups of operations as graphs, described so that equal ones are compiled once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fzero._torch import Form, inductor_for_lengths
from fzero.graph._ir import COPY, is_input, signature
from fzero.graph._ops import name_of
from fzero.graph._polynomials import Polynomial, mapped, whole_numbers
from fzero.graph.run._compile import Code, Runs, compile_error, note_compiled
from fzero.graph.run._groups import operands, read_by_loops, sources

__all__ = ["Segment", "Template", "compile_template", "numbers_of", "segment", "structure_of", "take_rounded"]

# Rounded: a narrow parameter that is to be its master's rounded value becomes that value, not the old one and a step.
#
# `optim.master_weights` hands out the difference of two narrow values, and `optim.apply_updates` adds it. Compiled,
# that reads the old parameter for nothing, and takes a fifth of the update's time.


def take_rounded(graph: Graph) -> None:
    """Replace each `p + (r - p)`, of narrow values in a wide dtype, by `r`. It is exact, where the sum may round."""
    for node in graph.nodes:
        rounded = _rounded(node)
        if rounded is not None:
            node.replace_all_uses_with(rounded)


def _rounded(node: Node) -> Node | None:
    """Return `r` of a node that is `narrow(p + (wide(r) - wide(p)))`, if nothing else reads it."""
    total = _operands(node, "_to_copy", 1)
    parts = _operands(total[0], "add", 2) if total else []
    step = _operands(parts[1], "sub", 2) if parts else []
    wide = [x for a in step for x in _operands(a, "_to_copy", 1)]
    if len(wide) != 2 or wide[1] is not parts[0] or len(wide[0].users) != 1:
        return None
    same = signature(wide[0].meta["val"]) == signature(node.meta["val"]) == signature(wide[1].meta["val"])
    widened = [a.meta["val"].dtype for a in (*step, total[0])]
    return wide[0] if same and all(x.itemsize > node.meta["val"].dtype.itemsize for x in widened) else None


def _operands(node: Node, name: str, count: int) -> list[Node]:
    """List the operands of an operation of this name, if it has so many and no others."""
    if name_of(node) != name or len(node.args) != count or "alpha" in node.kwargs:
        return []
    found = [a for a in node.args if isinstance(a, Node)]
    return found if len(found) == count else []


# Segments: groups of operations as graphs of their own, described so that equal ones are compiled once.


class Segment(NamedTuple):
    """Operations that are compiled together.

    Attributes:
        key: segments with equal code have equal ones.
        graph: the code: its arguments are the slots `ins`, its results go to the slots `outs`.
        fakes: stand-ins of the arguments.
        made: stand-ins of the results.
        ins: slots.
        outs: slots.
        free: slots that are not needed after it.
        scalars: whether it computes 0-d values only. Torch runs them: to compile them takes longer than they ever do.
    """

    key: Hashable
    graph: Graph
    fakes: list[torch.Tensor]
    made: list[torch.Tensor]
    ins: list[int]
    outs: list[int]
    free: list[int]
    scalars: bool = False


def segment(
    group: Sequence[Node],
    exports: Sequence[Node],
    slot: dict[Node, int],
    parts: AbstractSet[Node],
    small: AbstractSet[Node],
) -> Segment | None:
    """Make a segment of a group, or nothing of a group whose results nobody needs.

    Args:
        group: nodes that are compiled together.
        exports: those of them that others need. They are given new slots.
        slot: of all values that are there.
        parts: the views that count as values.
        small: the scalars of the graph.
    """
    if not exports and not any(n.target is COPY for n in group):
        return None
    exports = list(dict.fromkeys([*exports, *read_by_loops(group, small)]))
    graph = Graph()
    ins = [x for x in sources(operands(group), parts) if x in slot]
    copies: dict[Node, Node] = {}
    for i, x in enumerate(ins):
        copies[x] = graph.placeholder(f"x{i}")
        copies[x].meta = {"val": x.meta["val"]}
    for node in group:
        for a in node.all_input_nodes:
            _copy_views(a, graph, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in exports)).meta = {}
    take_rounded(graph)
    graph.eliminate_dead_code()
    for x in exports:
        slot[x] = len(slot)
    fakes, made = [x.meta["val"] for x in ins], [x.meta["val"] for x in exports]
    key, scalars = (_key(graph), tuple([signature(x) for x in made])), small >= {*group}
    return Segment(key, graph, fakes, made, [slot[x] for x in ins], [slot[x] for x in exports], [], scalars)


def _copy_views(node: Node, graph: Graph, copies: dict[Node, Node]) -> None:
    """Make a value anew in a segment's graph if it is not there: a view, and the views that it is made of."""
    todo = [node]
    while todo:
        n = todo[-1]
        missing = [] if n in copies else [a for a in n.all_input_nodes if a not in copies]
        if missing:
            todo += missing
            continue
        if n not in copies:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        todo.pop()


def _key(graph: Graph) -> Hashable:
    """Describe a graph so that equal descriptions have equal code."""
    number = {n: i for i, n in enumerate(graph.nodes)}

    def line(n: Node) -> Hashable:
        if is_input(n):
            return signature(n.meta["val"])
        return str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: _Number(number[a])))  # pyright: ignore

    return tuple([line(n) for n in graph.nodes])


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


# Templates: segments whose whole numbers are polynomials of a length, compiled with the length as an argument.


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
