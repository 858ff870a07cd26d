"""One step, operation by operation: what each took, and at which source line."""

import ast
import functools
import linecache
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fzero._torch.watched import WatchedOperation, lines_of_nodes, place_now, watching
from fzero.graph import TimedOperation, clocked

__all__ = ["LineCost", "Span", "by_line", "spans"]


class Span(NamedTuple):
    """An operation of one step.

    Attributes:
        name: such as "aten::mm", or "compiled code".
        line: the user's, as "file:line"; of a backward pass, that of the forward operation. "" where there is none.
        function: the function or method that the line is in, such as "Attention.forward".
        phase: "forward", "backward" or "update".
        start: seconds of operations that ran before it.
        seconds: that it took.
    """

    name: str
    line: str
    function: str
    phase: str
    start: float
    seconds: float


class LineCost(NamedTuple):
    """What the operations of one source line took in one step.

    Attributes:
        line: as "file:line".
        function: the function or method that it is in.
        code: its text.
        seconds: of its operations, forward and backward.
        backward_seconds: of those in the backward pass.
        calls: how many operations.
    """

    line: str
    function: str
    code: str
    seconds: float
    backward_seconds: float
    calls: int


@contextmanager
def spans() -> Iterator[list[Span]]:
    """Give the operations that ran within, afterwards. Each waits for its end on the device."""
    found: list[TimedOperation] = []
    placed: list[Span] = []

    def before(operation: WatchedOperation) -> float:
        return time.perf_counter()

    def after(operation: WatchedOperation, start: float, results: Sequence[Any]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, place = time.perf_counter() - start, place_now()
        phase = "backward" if place.backward else "forward" if place.forward else ""
        found.append(TimedOperation(operation.name, place.line, phase, seconds))

    with clocked(found.append), lines_of_nodes(), watching(before, after):
        yield placed
    placed += _placed(found)


def _placed(ran: Sequence[TimedOperation]) -> list[Span]:
    """Put operations one after the other; tell the pass of those that do not know it by where they stand."""
    behind = [i for i, r in enumerate(ran) if r.phase == "backward"]
    start, placed = 0.0, list[Span]()
    for i, r in enumerate(ran):
        here = "forward" if not behind or i < behind[0] else "update" if i > behind[-1] else "backward"
        placed.append(Span(r.name, r.line, function_at(r.line), r.phase or here, start, r.seconds))
        start += r.seconds
    return placed


def by_line(ran: Iterable[Span]) -> tuple[LineCost, ...]:
    """Add up operations by source line, the dearest first."""
    sums: dict[str, list[Span]] = {}
    for span in ran:
        sums.setdefault(span.line, []).append(span)
    costs = [
        LineCost(
            line,
            mine[0].function,
            _code(line),
            sum([s.seconds for s in mine]),
            sum([s.seconds for s in mine if s.phase == "backward"]),
            len(mine),
        )
        for line, mine in sums.items()
    ]
    return tuple(sorted(costs, key=lambda c: -c.seconds))


def _code(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if file else ""


def function_at(line: str) -> str:
    """Return the function or method that a line is in, such as "Attention.forward"; "" at the top of a file."""
    file, _, number = line.rpartition(":")
    if not file:
        return ""
    inside = [(last - first, name) for first, last, name in _functions(file) if first <= int(number) <= last]
    return min(inside)[1] if inside else ""


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """List the functions of a file: their first and last lines, and their names with those of their classes."""
    try:
        module = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found: list[tuple[int, int, str]] = []

    def look(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{outer}.{child.name}" if isinstance(node, ast.ClassDef) else child.name
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, name))
            look(child, name)

    look(module, "")
    return tuple(found)
