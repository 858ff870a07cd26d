"""Compile: each distinct segment once, by all the processes of a machine together.

Ranks compile the same segments, so each takes one that no other has begun: a lock in the folder of Inductor's cache
says which. What another process has compiled is loaded from that cache. So do workers, processes without a rank that
compile where there are more cores than ranks. Nothing is told from one to the other: a process that dies gives its lock
back, and one that has a cache of its own compiles everything.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch.fx import Graph, GraphModule

from fzero._torch import importing, inductor, inductor_folder, line_of

__all__ = ["Code", "Runs", "can_load", "compile_all", "compile_graph", "compiled", "is_compiled", "name_of_code"]

Runs = Callable[[list[Any]], Sequence[Any]]  # a function of a list of arguments, which it empties, to results

PATIENCE = 600.0  # seconds that a process waits for a segment that another compiles; then it does so itself


class Code(NamedTuple):
    """What is to be compiled.

    Attributes:
        graph: the code.
        fakes: stand-ins of its arguments.
        name: of its files; equal for equal code.
        where: of which instruction, for errors.
    """

    graph: Graph
    fakes: Sequence[torch.Tensor]
    name: str
    where: str = "a segment"


def name_of_code(key: Hashable) -> str:
    """Make the name of the segments that have this key, the same in all processes."""
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]


def compiled(code: Code) -> Runs:
    """Compile a segment, and leave a note of it beside Inductor's cache.

    Raises:
        RuntimeError: if Inductor cannot compile it. Names its operations and their source lines.
    """
    runs = compile_graph(code.graph, code.fakes, code.where)
    with suppress(OSError):
        _file(code, "done").touch()
    return runs


def compile_all(codes: Sequence[Code], one: Callable[[Code], Runs] = compiled) -> Iterator[tuple[Code, Runs]]:
    """Compile segments, the longest first, and those last that other processes are compiling.

    Args:
        codes: distinct segments.
        one: compiles one of them.

    Yields:
        Each with its function, as soon as it is there.

    Raises:
        RuntimeError: if Inductor cannot compile a segment. Names its operations and their source lines.
    """
    left = sorted(codes, key=lambda code: -len(code.graph.nodes))
    while left:
        busy = []
        for code in left:
            with _taken(code, 0.0) as mine:
                runs = one(code) if mine else None
            if runs is None:
                busy.append(code)
            else:
                yield code, runs
        if len(busy) == len(left):  # all that is left is another's: wait for one
            code, *busy = busy
            with _taken(code, PATIENCE):
                runs = one(code)
            yield code, runs
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


def compile_graph(graph: Graph, fakes: Sequence[torch.Tensor], where: str) -> Runs:
    """Compile a graph with Inductor.

    Raises:
        RuntimeError: if that fails. Names the operations and their source lines.
    """
    try:
        return inductor(GraphModule({}, graph), fakes)
    except Exception as error:
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        lines = list(dict.fromkeys(line for n in nodes if (line := line_of(n))))
        names = list(dict.fromkeys(str(n.target) for n in nodes))
        raise RuntimeError(
            f"fzero.jit: Inductor could not compile {where} ({len(nodes)} operations: {', '.join(names[:6])}"
            f"{', ...' if len(names) > 6 else ''}), traced from {', '.join(lines[:6])}: {error}. "
            'backend="fx" runs without a compiler'
        ) from error
