"""Compile: each distinct segment once, by all the processes of a machine together.

Ranks compile the same segments, so each takes one that no other has begun: a lock in the folder of Inductor's cache
says which. What another process has compiled is loaded from that cache. So do workers, processes without a rank that
compile where there are more cores than ranks. Nothing is told from one to the other: a process that dies gives its lock
back, and one that has a cache of its own compiles everything.
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

from fzero._torch import importing, inductor, inductor_folder, line_of
from fzero.graph._ops import is_view, name_of

__all__ = [
    "Code",
    "CompileError",
    "Runs",
    "can_load",
    "compile_all",
    "compile_error",
    "compile_graph",
    "compiled",
    "described",
    "first_line",
    "is_compiled",
    "name_of_code",
    "progress",
]

# Progress: a bar on a terminal, and elsewhere a line, for what takes long.


T = TypeVar("T")

NO_BAR = 5.0  # seconds that pass without a bar


def progress(items: Iterable[T], total: int) -> Iterator[T]:
    """Yield segments as they are compiled. If it takes long, a machine's first rank says how far it is.

    It has a bar on a terminal. Where there is none, one line on stderr says what the step waits for.

    Args:
        items: what is compiled.
        total: how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield from items
        return
    if not console.is_terminal:
        yield from _with_a_line(items, total, console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("fzero.jit compiles"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("segments", total=total)
    timer = threading.Timer(NO_BAR, bar.start)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        bar.stop()


def _with_a_line(items: Iterable[T], total: int, console: Any) -> Iterator[T]:
    segments = f"{total} segment{'s' * (total != 1)}"
    text = f'fzero.jit compiles {segments} before the first step, once on a machine; backend="auto" does not wait'
    timer = threading.Timer(NO_BAR, console.print, [text], {"soft_wrap": True, "highlight": False})
    timer.daemon = True
    timer.start()
    try:
        yield from items
    finally:
        timer.cancel()


Runs = Callable[[list[Any]], Sequence[Any]]  # a function of a list of arguments, which it empties, to results

MOST = 6  # operations and lines that an error lists

PATIENCE = 600.0  # seconds that a process waits for a segment that another compiles; then it does so itself


class Code(NamedTuple):
    """What is to be compiled.

    Attributes:
        graph: the code.
        fakes: stand-ins of its arguments.
        made: stand-ins of its results.
        name: of its files; equal for equal code.
        where: of which instruction, for errors.
    """

    graph: Graph
    fakes: Sequence[torch.Tensor]
    made: Sequence[Any]
    name: str
    where: str = "a segment"


class CompileError(RuntimeError):
    """A segment that cannot run compiled; `segment` says which, `reason` why."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f'fzero.jit: {segment}: {reason}. backend="fx" runs without a compiler')
        self.segment = segment
        self.reason = reason


def name_of_code(key: Hashable) -> str:
    """Make the name of the segments that have this key, the same in all processes."""
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]


def compiled(code: Code) -> Runs:
    """Compile a segment, and leave a note of it beside Inductor's cache.

    Raises:
        CompileError: if Inductor cannot compile it. Names its operations and their source lines.
    """
    runs = compile_graph(code.graph, code.fakes, code.made, code.where)
    note_compiled(code)
    return runs


def note_compiled(code: Code) -> None:
    """Leave a note of a segment beside Inductor's cache: see `is_compiled`."""
    with suppress(OSError):
        _file(code, "done").touch()


def compile_all(codes: Sequence[Code], one: Callable[[Code], T]) -> Iterator[tuple[Code, T]]:
    """Compile segments, the longest first, and those last that other processes are compiling.

    Args:
        codes: distinct segments.
        one: compiles one of them.

    Yields:
        Each with what `one` made of it, as soon as it is there.
    """
    left = sorted(codes, key=lambda code: -len(code.graph.nodes))
    while left:
        busy = []
        for code in left:
            with _taken(code, 0.0) as mine:
                done = [one(code)] if mine else []
            if not done:
                busy.append(code)
            else:
                yield code, done[0]
        if len(busy) == len(left):  # all that is left is another's: wait for one
            code, *busy = busy
            with _taken(code, PATIENCE):
                made = one(code)
            yield code, made
        left = busy


def can_load() -> bool:
    """Return whether Inductor itself is loaded, so that a segment takes a moment; if not, begin to, in a thread."""
    return not importing().is_alive()


def is_compiled(code: Code) -> bool:
    """Return whether a process of this machine has compiled a segment, into the cache that this one has."""
    try:
        return _file(code, "done").exists()
    except OSError:  # a folder that cannot be made
        return False


@contextmanager
def _taken(code: Code, seconds: float) -> Iterator[bool]:
    """Hold the lock of a segment, if it is there within so many seconds, and say whether it was."""
    try:
        lock = FileLock(_file(code, "lock"))
        lock.acquire(timeout=seconds)
    except Timeout:
        yield False
        return
    except (NotImplementedError, OSError):  # a file system without locks, a folder that cannot be made
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _file(code: Code, what: str) -> Path:
    folder = inductor_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{code.name}.{what}"


def compile_graph(graph: Graph, fakes: Sequence[torch.Tensor], made: Sequence[Any], where: str) -> Runs:
    """Compile a graph with Inductor.

    Raises:
        CompileError: if that fails. Names the operations and their source lines.
    """
    with compile_error(graph, where):
        return inductor(GraphModule({}, graph), fakes, made)


@contextmanager
def compile_error(graph: Graph, where: str) -> Iterator[None]:
    """Turn what Inductor raises into a `CompileError` that names the operations and their source lines."""
    try:
        yield
    except Exception as error:
        raise CompileError(described(graph, where), f"Inductor could not compile it: {first_line(error)}") from error


def described(graph: Graph, where: str) -> str:
    """Describe a segment to a user: its operations, and the lines that they were traced from."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    lines = list(dict.fromkeys(line for n in nodes if (line := line_of(n))))
    names = list(dict.fromkeys(name_of(n) or str(n.target) for n in nodes if not is_view(n)))
    return f"{where} ({len(nodes)} operations: {_few(names)}), traced from {_few(lines) or 'no line of yours'}"


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:MOST]) + ", ..." * (len(texts) > MOST)


def first_line(error: BaseException) -> str:
    """Return the line of an error that says what happened, without torch's advice to authors of operations.

    Of an error of the C++ compiler it is what that says first.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, compilers = next(iter(lines), type(error).__name__), next((x for x in lines if " error: " in x), "")
    return (f"{first}: {compilers.partition(' error: ')[2]}" if compilers else first)[:300]
