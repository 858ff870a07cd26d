"""The threads of ranks in lockstep, and the state that all runs of a process share."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from fzero._torch.process_state import read_settings, write_settings
from fzero._torch.state import load_forward_mode

__all__ = ["process_threads"]


class _RankThreads:
    """A process's threads for ranks, shared by its active runs; runs may be nested, or in several threads.

    Attributes:
        pool: the threads, one for each rank that exists at a time.
        runs: the number of active runs.
        saved_settings: the process's settings when the first active run began.
        changes: the names of settings that a rank has changed.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="fzero rank")
        self.runs = 0
        self.saved_settings: dict[str, Any] = {}
        self.changes: set[str] = set()
        self._lock = threading.Lock()
        self._end_event = threading.Event()
        self._forward_level_future: Future[None] = Future()

    @contextmanager
    def run_context(self) -> Iterator[None]:
        """Count a run as active, within `with`."""
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

    def record_changes(self, names: Iterable[str]) -> None:
        """Record settings that a rank has changed; of two runs at a time, one may see the changes of the other."""
        self.changes.update(names)

    def _begin(self) -> None:
        load_forward_mode()
        self.saved_settings, self.changes, self._end_event = read_settings(), set(), threading.Event()
        ready: Future[None] = Future()
        self._forward_level_future = self.pool.submit(_hold_forward_level, ready, self._end_event)
        ready.result()

    def _end(self) -> None:
        self._end_event.set()
        self._forward_level_future.result()
        write_settings({name: self.saved_settings[name] for name in self.changes})


def _hold_forward_level(ready: Future[None], end: threading.Event) -> None:
    """Stay in a forward-mode derivative until the last run ends.

    The derivative's level belongs to the process: a rank that left its jvp would end the level of the other ranks.
    Within a level that outlasts them all, ranks open none.
    """

    def wait(x: torch.Tensor) -> torch.Tensor:
        ready.set_result(None)
        end.wait()
        return x

    try:
        zero = torch.zeros((), device="cpu")
        torch.func.jvp(wait, (zero,), (zero,))
    except BaseException as error:  # such as a level that is already open
        ready.set_exception(error)


_THREADS: dict[int, _RankThreads] = {}


def process_threads() -> _RankThreads:
    """Return this process's threads; a fork has none of its parent's."""
    pid = os.getpid()
    return _THREADS.get(pid) or _THREADS.setdefault(pid, _RankThreads())
