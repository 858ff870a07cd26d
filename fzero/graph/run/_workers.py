"""Workers: processes without a rank that compile segments into the cache from which the ranks load them.

A worker receives all segments at once. Like a rank, it takes one segment after another that no other process has begun.
It ends when all are compiled, or when the process that started it ends.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from fzero._torch import compile_threads, pickle_graphs, unpickle_graphs
from fzero.graph._polynomials import Polynomial
from fzero.graph.run._segment_compiler import Code, compile_all, compile_and_mark
from fzero.graph.run._template import Template, compile_template

__all__ = ["Workers", "start_workers", "worker_count"]

_QUIET = subprocess.DEVNULL
_MOST_WORKERS = 7  # workers of one rank; importing torch takes each a second of a core and 300 MB


class Workers(NamedTuple):
    """Processes that compile.

    Attributes:
        processes: the workers, which may have ended.
    """

    processes: tuple[subprocess.Popen[bytes], ...] = ()

    def are_done(self) -> bool:
        """Return whether all workers have ended."""
        return all(p.poll() is not None for p in self.processes)

    def stop(self) -> None:
        """Kill the workers."""
        for p in self.processes:
            p.kill()
            p.wait()
            if p.stdin is not None:
                with suppress(OSError, ValueError):  # the worker had not read all of its input
                    p.stdin.close()


def _spare_cores() -> int:
    """Return how many further cores this process may use if the ranks of a machine share all cores equally."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = cores // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(min(share, compile_threads()) - 1, 0)


def worker_count(cold: Sequence[Code]) -> int:
    """Return how many workers to start for some segments: none on a GPU, where each would need a CUDA context."""
    return min(_spare_cores(), len(cold) - 1) if all(code.on_cpu for code in cold) else 0


def start_workers(
    codes: Sequence[Code], count: int, nice: int = 0, templates: Mapping[str, Template] | None = None
) -> Workers:
    """Start workers that compile segments.

    Args:
        codes: distinct segments.
        count: how many workers to start. None start if the program has no Python executable, or if a graph cannot be
            pickled.
        nice: the workers' niceness, 0 to 19.
        templates: the templates of segments that are compiled for all lengths, by the name of the code.
    """
    lookup = templates or {}
    lengths = [(lookup[c.name].length, lookup[c.name].numbers) if c.name in lookup else None for c in codes]
    try:
        payload = pickle_graphs([(code.graph, code.stand_ins, code.outputs) for code in codes])
        data = pickle.dumps(([code.name for code in codes], lengths, payload))
    except Exception:  # a setting of Inductor or a constant cannot be pickled: this process compiles alone
        return Workers()
    if not sys.executable:
        return Workers()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([x or os.getcwd() for x in sys.path])}
    processes = []
    for _ in range(min(count, _MOST_WORKERS)):
        run = f"from {__name__} import {_compile_segments.__name__} as compile_segments; compile_segments({nice})"
        command = [sys.executable, "-c", run]
        p = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=_QUIET, stderr=_QUIET)
        threading.Thread(
            target=_send_to_worker, args=(p, data), daemon=True
        ).start()  # the worker reads after it has imported torch
        processes.append(p)
    return Workers(tuple(processes))


def _send_to_worker(worker: subprocess.Popen[bytes], data: bytes) -> None:
    assert worker.stdin is not None
    with suppress(OSError, ValueError):  # the worker has ended or was stopped: its segments are compiled here
        worker.stdin.write(len(data).to_bytes(8, "little") + data)
        worker.stdin.flush()  # the pipe stays open, which shows that this process lives


def _compile_segments(nice: int) -> None:
    """Compile the segments that standard input describes. Skip those that fail: the parent process compiles them."""
    os.nice(nice)
    stdin = sys.stdin.buffer
    names, lengths, graphs = pickle.loads(stdin.read(int.from_bytes(stdin.read(8), "little")))
    threading.Thread(target=_exit_with, args=(stdin,), daemon=True).start()
    codes = []
    for name, make in zip(names, unpickle_graphs(graphs), strict=True):
        with suppress(Exception):  # an operation that only the parent process has registered
            codes.append(Code(*make(), name))
    numbers = dict(zip(names, lengths, strict=True))
    for _ in compile_all(codes, lambda code: _try_compile(code, numbers[code.name])):
        pass
    os._exit(0)  # skip the interpreter's shutdown, which would wait for the reading thread


def _exit_with(stdin: BinaryIO) -> None:
    """End this process when the process that writes to its input ends."""
    stdin.read()
    os._exit(0)


def _try_compile(code: Code, numbers: tuple[int, tuple[Polynomial, ...]] | None) -> None:
    """Compile a segment, or skip it on an error: the parent process meets the same error, and can name its source."""
    with suppress(Exception):
        if numbers is None:
            compile_and_mark(code)
        else:
            compile_template(Template(code, *numbers, code.name))
