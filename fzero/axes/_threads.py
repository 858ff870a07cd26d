"""The threads that ranks in lockstep run on, and what all runs of a process share while any of them goes on."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fzero._torch.state import put_settings, settings

__all__ = ["Threads", "threads_here"]


class Threads:
    """A process's threads for ranks, and its runs, of which several may go on: one in another, or in two threads.

    Attributes:
        pool: as many threads as there are ranks at a time.
        runs: how many go on.
        found: the process's settings as the first of them found them.
        changed: those settings that one of their ranks has changed.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="fzero rank")
        self.runs = 0
        self.found: dict[str, Any] = {}
        self.changed: set[str] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._keeper: Future[None] = Future()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Say that a run goes on."""
        with self._lock:
            if self.runs == 0:
                self._begin()
            self.runs += 1
        try:
            yield
        finally:
            with self._lock:
                self.runs -= 1
                if self.runs == 0:
                    self._end()

    def note_changes(self, names: Iterable[str]) -> None:
        """Note settings that a rank has changed: where two runs go on, one may find them changed by the other."""
        self.changed.update(names)

    def _begin(self) -> None:
        self.found, self.changed, self._over = settings(), set(), threading.Event()
        opened: Future[None] = Future()
        self._keeper = self.pool.submit(_keep_a_level, opened, self._over)
        opened.result()

    def _end(self) -> None:
        self._over.set()
        self._keeper.result()
        put_settings({name: self.found[name] for name in self.changed})


def _keep_a_level(opened: Future[None], over: threading.Event) -> None:
    """Stay in a forward-mode derivative until all is over.

    Its level is the process's: a rank that left its jvp would end that of the others. Within one that outlasts them
    all, ranks open none.
    """

    def wait(x: torch.Tensor) -> torch.Tensor:
        opened.set_result(None)
        over.wait()
        return x

    try:
        nothing = torch.zeros(())
        torch.func.jvp(wait, (nothing,), (nothing,))
    except BaseException as error:  # such as: a level is open already
        opened.set_exception(error)


_THREADS: dict[int, Threads] = {}


def threads_here() -> Threads:
    """Return this process's threads; a fork has none of its parent's."""
    here = os.getpid()
    return _THREADS.get(here) or _THREADS.setdefault(here, Threads())
