"""Compile: each distinct segment once, shared between all processes of a machine.

Ranks compile the same segments, so each rank takes a segment that no other process has begun: locks in the folder of
Inductor's cache show which ones are free. Segments that another process compiled are loaded from the cache. Workers,
processes without a rank that use spare cores, take segments in the same way. The processes exchange no messages: a
process that dies releases its lock, and a process with a cache of its own compiles everything.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from filelock import FileLock, Timeout
from torch.fx import Graph, GraphModule

from fzero._torch import inductor, inductor_folder, node_line, start_cpu_probe, start_import
from fzero.graph.ir import is_view, op_name

__all__ = [
    "Code",
    "CompileError",
    "GraphFunction",
    "can_load",
    "compile_all",
    "compile_and_mark",
    "compile_error",
    "compile_graph",
    "describe_segment",
    "first_line",
    "is_compiled",
    "mark_compiled",
    "progress",
    "segment_name",
]


_T = TypeVar("_T")

_QUIET_SECONDS = 5.0  # before a bar or a line is shown


def progress(items: Iterable[_T], total: int) -> Iterator[_T]:
    """Yield segments as they are compiled. If that takes long, a machine's first rank shows the progress.

    On a terminal it shows a bar. Elsewhere it prints one line on stderr, which says what the step waits for.

    Args:
        items: the segments, yielded as they are compiled.
        total: the number of segments.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield from items
        return
    if not console.is_terminal:
        yield from _announce_compilation(items, total, console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("fzero.jit compiles"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("segments", total=total)
    timer = threading.Timer(_QUIET_SECONDS, bar.start)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        bar.stop()


def _announce_compilation(items: Iterable[_T], total: int, console: Any) -> Iterator[_T]:
    segments = f"{total} segment{'s' * (total != 1)}"
    text = f'fzero.jit compiles {segments} before the first step, once per machine; backend="auto" does not wait'
    timer = threading.Timer(_QUIET_SECONDS, console.print, [text], {"soft_wrap": True, "highlight": False})
    timer.daemon = True
    timer.start()
    try:
        yield from items
    finally:
        timer.cancel()


# runs a graph: from a list of arguments, which it empties, to results
GraphFunction = Callable[[list[Any]], Sequence[Any]]

_MAX_LISTED = 6  # how many operations and lines an error lists

_MAX_LOCK_SECONDS = 600.0  # to wait for a segment that another process compiles, before compiling it here


class Code(NamedTuple):
    """What Inductor needs to compile a segment.

    Attributes:
        graph: the segment's operations.
        stand_ins: stand-ins of its arguments.
        outputs: stand-ins of its results.
        name: the name of its files; equal for equal code.
        location: the segment's number, for errors: "segment 2 of 9".
    """

    graph: Graph
    stand_ins: Sequence[torch.Tensor]
    outputs: Sequence[Any]
    name: str
    location: str = "a segment"

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on the CPU alone."""
        return all(x is None or x.device.type == "cpu" for x in self.stand_ins)  # a torch.Generator is None


class CompileError(RuntimeError):
    """A segment cannot run compiled. `segment` describes the segment; `reason` gives the reason."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f'fzero.jit: {segment}: {reason}. backend="fx" runs without a compiler')
        self.segment = segment
        self.reason = reason


def segment_name(key: Hashable) -> str:
    """Return the name of the segments with this key. It is the same in all processes."""
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]


def compile_and_mark(code: Code) -> GraphFunction:
    """Compile a segment, and mark it as compiled in the folder of Inductor's cache.

    Raises:
        CompileError: if Inductor cannot compile the segment. The message names its operations and their source lines.
    """
    function = compile_graph(code.graph, code.stand_ins, code.outputs, code.location)
    mark_compiled(code)
    return function


def mark_compiled(code: Code) -> None:
    """Mark a segment as compiled in the folder of Inductor's cache, for `is_compiled`."""
    with suppress(OSError):
        _marker_file(code, "done").touch()


def compile_all(codes: Sequence[Code], compile_one: Callable[[Code], _T]) -> Iterator[tuple[Code, _T]]:
    """Compile segments: the longest first, and segments that other processes are compiling last.

    Args:
        codes: distinct segments.
        compile_one: compiles one segment.

    Yields:
        Each segment with the result of `compile_one`, as soon as it is compiled.
    """
    pending = sorted(codes, key=lambda code: -len(code.graph.nodes))
    while pending:
        busy = []
        for code in pending:
            with _segment_lock(code, 0.0) as is_locked:
                results = [compile_one(code)] if is_locked else []
            if not results:
                busy.append(code)
            else:
                yield code, results[0]
        if len(busy) == len(pending):  # other processes are compiling all the pending segments: wait for one
            code, *busy = busy
            with _segment_lock(code, _MAX_LOCK_SECONDS):
                result = compile_one(code)
            yield code, result
        pending = busy


def can_load(code: Code) -> bool:
    """Return whether Inductor is ready, so that a segment loads quickly. If not, let a thread prepare it."""
    threads = [start_import(), *([start_cpu_probe()] if code.on_cpu else [])]
    return not any(thread.is_alive() for thread in threads)


def is_compiled(code: Code) -> bool:
    """Return whether a process of this machine has compiled a segment into this process's cache."""
    try:
        return _marker_file(code, "done").exists()
    except OSError:  # the folder cannot be made
        return False


@contextmanager
def _segment_lock(code: Code, seconds: float) -> Iterator[bool]:
    """Try for some seconds to hold the lock of a segment. Yield whether this process may compile the segment."""
    try:
        lock = FileLock(_marker_file(code, "lock"))
        lock.acquire(timeout=seconds)
    except Timeout:
        yield False
        return
    except (NotImplementedError, OSError):  # the file system has no locks, or the folder cannot be made
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _marker_file(code: Code, suffix: str) -> Path:
    folder = inductor_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{code.name}.{suffix}"


def compile_graph(
    graph: Graph, stand_ins: Sequence[torch.Tensor], outputs: Sequence[Any], location: str
) -> GraphFunction:
    """Compile a graph with Inductor.

    Raises:
        CompileError: if that fails. The message names the operations and their source lines.
    """
    with compile_error(graph, location):
        return inductor(GraphModule({}, graph), stand_ins, outputs)


@contextmanager
def compile_error(graph: Graph, location: str) -> Iterator[None]:
    """Turn an error of Inductor into a `CompileError` that names the operations and their source lines."""
    try:
        yield
    except Exception as error:
        raise CompileError(
            describe_segment(graph, location), f"Inductor could not compile it: {first_line(error)}"
        ) from error


def describe_segment(graph: Graph, location: str) -> str:
    """Describe a segment for the user: its operations, and their source lines."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    lines = list(dict.fromkeys(line for n in nodes if (line := node_line(n))))
    names = list(dict.fromkeys(op_name(n) or str(n.target) for n in nodes if not is_view(n)))
    traced_from = _first_listed(lines) or "no line of yours"
    return f"{location} ({len(nodes)} operations: {_first_listed(names)}), traced from {traced_from}"


def _first_listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_MAX_LISTED]) + ", ..." * (len(texts) > _MAX_LISTED)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without torch's advice to authors of operations.

    For an error of the C++ compiler, append the compiler's first error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, compilers = next(iter(lines), type(error).__name__), next((x for x in lines if " error: " in x), "")
    return (f"{first}: {compilers.partition(' error: ')[2]}" if compilers else first)[:300]
