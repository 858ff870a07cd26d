"""Workers: processes without a rank that compile segments, into the cache from which the ranks load them.

A worker is given all segments at once, and takes them as a rank does, one that no other has begun. It ends when all are
compiled, or when the process that started it does.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from fzero._torch import compile_threads, pickled, unpickled
from fzero.graph._polynomials import Polynomial
from fzero.graph.run._compile import Code, compile_all, compiled
from fzero.graph.run._segment import Template, compile_template

__all__ = ["Workers", "helpers", "spare_cores", "start", "work"]

QUIET = subprocess.DEVNULL
MOST_WORKERS = 7  # workers of one rank: each takes a second of a core, and 300 MB, to import torch


class Workers(NamedTuple):
    """Processes that compile.

    Attributes:
        processes: they may have ended.
    """

    processes: tuple[subprocess.Popen[bytes], ...] = ()

    def are_done(self) -> bool:
        """Return whether all have ended."""
        return all(p.poll() is not None for p in self.processes)

    def stop(self) -> None:
        """End them, whatever they are doing."""
        for p in self.processes:
            p.kill()
            p.wait()
            if p.stdin is not None:
                with suppress(OSError, ValueError):  # it had not read all
                    p.stdin.close()


def spare_cores() -> int:
    """Return how many cores this process may use beside its own, if the ranks of a machine share all of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = cores // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(min(share, compile_threads()) - 1, 0)


def helpers(cold: Sequence[Code]) -> int:
    """Return how many workers help this process to compile segments: none on a GPU, where each would take a context."""
    on_cpu = all(x is None or x.device.type == "cpu" for code in cold for x in code.fakes)  # a torch.Generator is None
    return min(spare_cores(), len(cold) - 1) if on_cpu else 0


def start(codes: Sequence[Code], count: int, nice: int = 0, templates: Mapping[str, Template] | None = None) -> Workers:
    """Start workers that compile segments.

    Args:
        codes: distinct segments.
        count: how many to start, if it can be: not in a program without an interpreter of its own, or if a graph cannot
            be written down.
        nice: how much they give way to other processes, 0 to 19.
        templates: by the name of the code, of those that are compiled for all lengths.
    """
    known = templates or {}
    lengths = [(known[c.name].length, known[c.name].numbers) if c.name in known else None for c in codes]
    try:
        described = pickled([(code.graph, code.fakes, code.made) for code in codes])
        data = pickle.dumps(([code.name for code in codes], lengths, described))
    except Exception:  # a setting of Inductor, or a constant, that cannot be pickled: this process compiles them
        return Workers()
    if not sys.executable:
        return Workers()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([x or os.getcwd() for x in sys.path])}
    found = []
    for _ in range(min(count, MOST_WORKERS)):
        command = [sys.executable, "-c", f"from fzero.graph.run._workers import work; work({nice})"]
        p = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=QUIET, stderr=QUIET)
        threading.Thread(target=_tell, args=(p, data), daemon=True).start()  # it reads once it has imported torch
        found.append(p)
    return Workers(tuple(found))


def _tell(worker: subprocess.Popen[bytes], data: bytes) -> None:
    assert worker.stdin is not None
    with suppress(OSError, ValueError):  # it has ended, or was stopped: what it would have compiled is compiled here
        worker.stdin.write(len(data).to_bytes(8, "little") + data)
        worker.stdin.flush()  # and stays open, which tells that this process lives


def work(nice: int) -> None:
    """Compile the segments that standard input describes, and leave those that cannot be to who asked."""
    os.nice(nice)
    stdin = sys.stdin.buffer
    names, lengths, graphs = pickle.loads(stdin.read(int.from_bytes(stdin.read(8), "little")))
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    codes = []
    for name, make in zip(names, unpickled(graphs), strict=True):
        with suppress(Exception):  # an operation that only who asked has registered
            codes.append(Code(*make(), name))
    numbers = dict(zip(names, lengths, strict=True))
    for _ in compile_all(codes, lambda code: _attempted(code, numbers[code.name])):
        pass
    os._exit(0)  # without the end of an interpreter, which waits for a thread that reads


def _end_with(stdin: BinaryIO) -> None:
    """End this process when the one that writes to its input ends."""
    stdin.read()
    os._exit(0)


def _attempted(code: Code, numbers: tuple[int, tuple[Polynomial, ...]] | None) -> None:
    """Compile a segment, or leave it: who asked meets the error itself, and can say where it comes from."""
    with suppress(Exception):
        if numbers is None:
            compiled(code)
        else:
            compile_template(Template(code, *numbers, code.name))
