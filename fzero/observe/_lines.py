"""Time one step operation by operation, with the source line of each."""

import ast
import functools
import linecache
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fzero._torch import wait_for_device
from fzero._torch.call_site import current_call_site
from fzero._torch.recorder import Stacks
from fzero._torch.watched import WatchedOperation, record_node_lines, watch_operations
from fzero.graph import TimedOperation, record_operations

__all__ = ["LineCost", "Span", "StackCost", "record_spans", "sum_by_line", "sum_by_stack"]


class Span(NamedTuple):
    """An operation of one step.

    Attributes:
        name: the name, such as "aten::mm", or "compiled code".
        line: the user's line, as "file:line"; "" if there is none. In a backward pass, it is the line of the forward
            operation.
        function: the function or method that contains the line, such as "Attention.forward".
        phase: "forward", "backward" or "update".
        start: the sum of seconds of all operations before it.
        seconds: the seconds of the operation.
        stack: the functions and modules that it runs in, the outermost first, such as `("loss", "GPT", "layers.3")`. In
            a backward pass they are those of the forward operation. Empty if they are unknown, as for collectives of
            compiled steps.
    """

    name: str
    line: str
    function: str
    phase: str
    start: float
    seconds: float
    stack: tuple[str, ...] = ()


class LineCost(NamedTuple):
    """The cost of one source line in one step.

    Attributes:
        line: the line, as "file:line".
        function: the function or method that contains it.
        code: the text of the line.
        seconds: seconds of its operations, forward and backward.
        backward_seconds: seconds of its operations in the backward pass.
        calls: the number of its operations.
    """

    line: str
    function: str
    code: str
    seconds: float
    backward_seconds: float
    calls: int


class StackCost(NamedTuple):
    """The cost of a function or module in one step, with all that it calls.

    Attributes:
        stack: the functions and modules that it runs in, the outermost first; the last is this one.
        seconds: seconds of its operations, forward and backward.
        backward_seconds: seconds of its operations in the backward pass.
        calls: the number of its operations.
    """

    stack: tuple[str, ...]
    seconds: float
    backward_seconds: float
    calls: int


@contextmanager
def record_spans(file: str, function: str) -> Iterator[list[Span]]:
    """Record the operations that run within. The list is filled at the end. Each operation waits for the device.

    Args:
        file: the file of the function that calls the step. Stacks begin after it.
        function: the name of this function.
    """
    timed: list[TimedOperation] = []
    results: list[Span] = []
    stacks, forward_stacks = Stacks(file, function), dict[int, tuple[str, ...]]()

    def begin_operation(operation: WatchedOperation) -> float:
        return time.perf_counter()

    def end_operation(operation: WatchedOperation, start: float, results: Sequence[Any]) -> None:
        wait_for_device()
        seconds, site = time.perf_counter() - start, current_call_site()
        phase, stack = "forward" if site.forward else "", stacks.current()
        if site.backward:
            phase, stack = "backward", forward_stacks.get(site.sequence_number, ())
        forward_stacks.setdefault(site.sequence_number, stack)
        timed.append(TimedOperation(operation.name, line=site.line, phase=phase, seconds=seconds, stack=stack))

    with record_operations(timed.append), record_node_lines(), watch_operations(begin_operation, end_operation):
        yield results
    results += _place_spans(timed)


@contextmanager
def _mark_functions(prefix: str) -> Iterator[None]:
    """Show torch's profiler the function that each operation within belongs to, as an annotation around it.

    In a backward pass it is the function of the forward operation.

    Args:
        prefix: what the annotation's name begins with; then come the function and "backward", or "forward or update".
    """

    def begin_operation(operation: WatchedOperation) -> torch.profiler.record_function:
        site = current_call_site()
        phase = "backward" if site.backward else "forward or update"
        range_mark = torch.profiler.record_function(f"{prefix}{_function_at(site.line) or 'fzero'}, {phase}")
        range_mark.__enter__()
        return range_mark

    def end_operation(
        operation: WatchedOperation, range_mark: torch.profiler.record_function, results: Sequence[Any]
    ) -> None:
        range_mark.__exit__(None, None, None)

    with record_node_lines(), watch_operations(begin_operation, end_operation):
        yield


def _place_spans(operations: Sequence[TimedOperation]) -> list[Span]:
    """Place operations one after the other. Infer unknown phases from the position relative to the backward pass."""
    backward = [i for i, r in enumerate(operations) if r.phase == "backward"]
    start = 0.0
    results = list[Span]()
    for i, r in enumerate(operations):
        phase = "forward"
        if backward and i >= backward[0]:
            phase = "backward" if i <= backward[-1] else "update"
        results.append(
            Span(
                r.name,
                line=r.line,
                function=_function_at(r.line),
                phase=r.phase or phase,
                start=start,
                seconds=r.seconds,
                stack=r.stack,
            )
        )
        start += r.seconds
    return results


def sum_by_line(spans: Iterable[Span]) -> tuple[LineCost, ...]:
    """Add up operations by source line, the most expensive first."""
    sums: dict[str, list[Span]] = {}
    for span in spans:
        sums.setdefault(span.line, []).append(span)
    costs = [
        LineCost(
            line=line,
            function=group[0].function,
            code=_quote_line(line),
            seconds=sum([s.seconds for s in group]),
            backward_seconds=sum([s.seconds for s in group if s.phase == "backward"]),
            calls=len(group),
        )
        for line, group in sums.items()
    ]
    return tuple(sorted(costs, key=lambda c: -c.seconds))


def sum_by_stack(spans: Iterable[Span]) -> tuple[StackCost, ...]:
    """Add up operations by function and module. Each comes before those that it calls, in the order of the step."""
    sums: dict[tuple[str, ...], list[Span]] = {}
    for span in spans:
        for i in range(1, len(span.stack) + 1):
            sums.setdefault(span.stack[:i], []).append(span)
    first_positions = {stack: i for i, stack in enumerate(sums)}
    costs = [
        StackCost(
            stack,
            sum([s.seconds for s in group]),
            sum([s.seconds for s in group if s.phase == "backward"]),
            len(group),
        )
        for stack, group in sums.items()
    ]
    return tuple(sorted(costs, key=lambda c: [first_positions[c.stack[:i]] for i in range(1, len(c.stack) + 1)]))


def _quote_line(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if file else ""


def _function_at(line: str) -> str:
    """Return the function or method that contains a line, such as "Attention.forward"; "" at module level."""
    file, _, number = line.rpartition(":")
    if not file:
        return ""
    enclosing = [(last - first, name) for first, last, name in _functions_in(file) if first <= int(number) <= last]
    return min(enclosing)[1] if enclosing else ""


@functools.lru_cache(maxsize=256)
def _functions_in(file: str) -> tuple[tuple[int, int, str], ...]:
    """List the functions of a file: their first and last lines, and their names, qualified by their classes."""
    try:
        module = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    results: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{outer}.{child.name}" if isinstance(node, ast.ClassDef) else child.name
                if not isinstance(child, ast.ClassDef):
                    results.append((child.lineno, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(module, "")
    return tuple(results)
