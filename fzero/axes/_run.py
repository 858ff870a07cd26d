"""One run of a program on ranks in lockstep: where each rank is, whose turn it is, and what was sent to whom."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero._notice import see
from fzero._torch import is_tracing
from fzero._torch.state import OwnSettings, load_forward_mode, put_settings, settings

__all__ = [
    "GROUPS",
    "Abandoned",
    "DivergedError",
    "Letter",
    "LockstepRun",
    "RankGroup",
    "RankStatus",
    "Threads",
    "group_of",
    "shown",
    "threads_here",
]

# The threads that ranks in lockstep run on, and what all runs of a process share while any of them goes on.


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
        load_forward_mode()
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


Tensors = Sequence[torch.Tensor]


class DivergedError(RuntimeError):
    """Ranks in lockstep did not meet: they called different collectives, or some ended while others waited.

    On real processes the same program would hang, or mix up its messages.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=3, simulate="lockstep")
        >>> def program(x):
        ...     return fzero.collectives.psum(x) if fzero.axes.axis_index().item() != 1 else x
        >>> try:
        ...     mesh.spmd(program)(torch.ones(2))
        ... except fzero.errors.DivergedError as error:
        ...     print(str(error).split(". ")[0])
        ranks diverged: rank 1 ended, and ranks 0, 2 wait in psum over 'dp' of float32 [2]
    """


DivergedError.__module__ = "fzero"


class Abandoned(BaseException):
    """Ends a rank after another has failed; no Exception, so that a program's own handlers let it through."""


class RankStatus(NamedTuple):
    """Where a rank is: what it waits in, and at which line; or that it has ended."""

    what: str
    line: str


ENDED = RankStatus("ended", "")


class Letter(NamedTuple):
    """Which message: places in a group of ranks, and a tag."""

    sender: int
    receiver: int
    tag: int


def shown(xs: Tensors) -> str:
    """Say of what dtypes and shapes tensors are."""
    return ", ".join([f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in xs])


@dataclass
class RankGroup:
    """Ranks that meet: those along some axes.

    Attributes:
        run: that of these ranks.
        axis: the name of the axes.
        members: the ranks, in order.
        brought: what each of those who wait has brought to the meeting.
        mail: what was sent and not yet received, by sender, receiver and tag; the first sent goes first.
        awaited: whom a rank that waits for a message is waiting for: the sender and the tag.
    """

    run: "LockstepRun"
    axis: str
    members: list[int]
    brought: dict[int, Tensors] = field(default_factory=dict)
    mail: dict[Letter, deque[torch.Tensor]] = field(default_factory=dict)
    awaited: dict[int, Letter] = field(default_factory=dict)


class LockstepRun:
    """One run of a program on all ranks: where each rank is, and whose turn it is.

    Attributes:
        size: the number of ranks.
        waiting: where each rank is that waits in a meeting.
        given: what the meeting gave to each rank that has not gone on yet.
        ended: the result of each rank that has one.
        gone: the ranks whose threads are done, with a result or without.
        error: the first failure; all ranks are to end then.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: dict[int, RankStatus] = {}
        self.given: dict[int, Any] = {}
        self.ended: dict[int, Any] = {}
        self.gone: set[int] = set()
        self.error: BaseException | None = None
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._settings = [OwnSettings() for _ in range(size)]

    def begin(self) -> None:
        """Give the first rank the turn."""
        self._turns[0].release()

    def await_turn(self, rank: int) -> None:
        """Wait for a rank's turn."""
        self._turns[rank].acquire()
        self._settings[rank].put_on()

    def end_turn(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; if there is none, the ranks have diverged."""
        threads_here().note_changes(self._settings[rank].take_off())
        after = self._next(rank)
        if after is None and len(self.gone) < self.size:
            self.fail(DivergedError(self.report()))
            after = self._next(rank)
        if after is not None:
            self._turns[after].release()

    def _next(self, rank: int) -> int | None:
        """Return the next rank that can go on: one that does not wait, or any if it is to end."""
        ranks = ((rank + i) % self.size for i in range(1, self.size + 1))
        return next((r for r in ranks if r not in self.gone and (self.error or r not in self.waiting)), None)

    def pause(self, rank: int, place: RankStatus) -> None:
        """Note that a rank waits at a place, until something is `given` to it and it is no longer `waiting`."""
        self.waiting[rank] = place

    def give(self, rank: int, result: Any) -> None:
        """Give a rank what it waits for, so that it can go on."""
        self.given[rank] = result
        del self.waiting[rank]

    def await_gift(self, rank: int) -> Any:
        """Let the others run, until a rank that waits was given something, and return that."""
        self.end_turn(rank)
        self.await_turn(rank)
        if self.error is not None:
            raise Abandoned
        return self.given.pop(rank)

    def fail(self, error: BaseException) -> None:
        """End all ranks, each in its turn, so that none undoes what another does meanwhile."""
        self.error = self.error or error

    def places(self) -> dict[RankStatus, list[int]]:
        """Return which ranks are where, of those that wait or have ended."""
        found: dict[RankStatus, list[int]] = {}
        for rank in range(self.size):
            if rank in self.waiting or rank in self.ended:
                found.setdefault(self.waiting.get(rank, ENDED), []).append(rank)
        return found

    def report(self) -> str:
        """Say who diverged: the fewest first."""
        said = [_said(place, ranks) for place, ranks in sorted(self.places().items(), key=lambda item: len(item[1]))]
        return (
            f"ranks diverged: {', and '.join(said)}. All ranks of an axis call the same collectives in the same "
            f"order, with the same shapes and dtypes{see('a-hang')}"
        )


def _said(place: RankStatus, ranks: list[int]) -> str:
    """Say that these ranks are there: "ranks 0, 2 wait in psum over 'dp' of float32 [2] (train.py:7)"."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    if place == ENDED:
        return f"{who} ended"
    return f"{who} wait{'s' * (len(ranks) == 1)} in {place.what}" + (f" ({place.line})" if place.line else "")


GROUPS: dict[str, RankGroup] = {}
"""The groups of the ranks that run now, by their keys."""


def group_of(key: str) -> RankGroup:
    """Return a group of ranks that run.

    Raises:
        RuntimeError: if a rank's program is traced, or the ranks have ended.
    """
    if is_tracing():
        raise RuntimeError(
            "ranks in lockstep are threads, which cannot be traced into one graph; compile on fzero.mesh(...) without "
            'simulate="lockstep", whose ranks are a batch dimension'
        )
    if key not in GROUPS:
        raise RuntimeError(
            "the ranks in lockstep have ended: differentiate inside the rank program, or simulate by vmap"
        )
    if GROUPS[key].run.error is not None:  # another has failed, and this rank goes on in a `finally`
        raise Abandoned
    return GROUPS[key]
