"""Lockstep: ranks as threads of which one runs at a time, and which switch only where they meet in a collective.

Ranks run in rank order from one meeting to the next; the last to arrive computes for all. So a run is deterministic,
random numbers included. Any Python runs, and a debugger stops one rank while the others wait. Ranks that do not meet
are found at once: when nobody can go on, everybody's place is known.
"""

import contextvars
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero._notice import see
from fzero._torch import is_tracing, user_line, without_function_modes
from fzero._torch.state import OwnSettings, thread_state
from fzero.axes._threads import threads_here
from fzero.axes.axis import Axis
from fzero.axes.scope import bound

__all__ = ["DivergedError", "in_lockstep", "is_lockstep", "meet", "run", "same"]

Tensors = Sequence[torch.Tensor]


class DivergedError(RuntimeError):
    """Ranks in lockstep did not meet: they called different collectives, or some ended while others waited.

    On real processes the same program would hang, or mix up its messages.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=3, simulate="lockstep")
        >>> def program(x):
        ...     return fzero.psum(x) if fzero.axis_index().item() != 1 else x
        >>> try:
        ...     mesh.spmd(program)(torch.ones(2))
        ... except fzero.DivergedError as error:
        ...     print(str(error).split(". ")[0])
        ranks diverged: rank 1 ended, and ranks 0, 2 wait in psum over 'dp' of float32 [2]
    """


DivergedError.__module__ = "fzero"


class _Abandoned(BaseException):
    """Ends a rank after another has failed; no Exception, so that a program's own handlers let it through."""


class _Place(NamedTuple):
    """Where a rank is: what it waits in, and at which line; or that it has ended."""

    what: str
    line: str


ENDED = _Place("ended", "")


@dataclass
class _Group:
    """Ranks that meet: those along some axes.

    Attributes:
        run: that of these ranks.
        axis: the name of the axes.
        members: the ranks, in order.
        brought: what each of those who wait has brought to the meeting.
    """

    run: "_Run"
    axis: str
    members: list[int]
    brought: dict[int, Tensors] = field(default_factory=dict)


class _Run:
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
        self.waiting: dict[int, _Place] = {}
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

    def fail(self, error: BaseException) -> None:
        """End all ranks, each in its turn, so that none undoes what another does meanwhile."""
        self.error = self.error or error

    def places(self) -> dict[_Place, list[int]]:
        """Return which ranks are where, of those that wait or have ended."""
        found: dict[_Place, list[int]] = {}
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


def _said(place: _Place, ranks: list[int]) -> str:
    """Say that these ranks are there: "ranks 0, 2 wait in psum over 'dp' of float32 [2] (train.py:7)"."""
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    if place == ENDED:
        return f"{who} ended"
    return f"{who} wait{'s' * (len(ranks) == 1)} in {place.what}" + (f" ({place.line})" if place.line else "")


_GROUPS: dict[str, _Group] = {}
_NUMBERS = itertools.count()


def is_lockstep(group: str) -> bool:
    """Return whether a group's ranks are threads in lockstep."""
    return group.startswith("lockstep/")


def in_lockstep() -> bool:
    """Return whether this thread is a rank in lockstep."""
    axes = bound()
    return bool(axes) and is_lockstep(axes[0].group)


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal to the last bit; tensors' nans are."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and bool(x == y or (x != x and y != y))
    if x.shape != y.shape or x.dtype != y.dtype or x.is_meta != y.is_meta:
        return False
    if x.is_meta:
        return True
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def meet(group: str, rank: int, what: str, xs: Tensors, compute: Callable[[list[Tensors], bool], list[Any]]) -> Any:
    """Wait until all ranks of a group have called this, and get this rank's part of what they make together.

    Args:
        group: the group's key.
        rank: this rank's place in it.
        what: what the ranks do; it must be the same for all, as must be the shapes and dtypes.
        xs: this rank's tensors.
        compute: called once, `(all ranks' tensors in rank order, whether rank 0 of the world is among them)`; gives
            each rank's result.

    Raises:
        DivergedError: if the ranks do not meet.
        RuntimeError: if a rank's program is traced.
    """
    if is_tracing():
        raise RuntimeError(
            "ranks in lockstep are threads, which cannot be traced into one graph; compile on fzero.mesh(...) without "
            'simulate="lockstep", whose ranks are a batch dimension'
        )
    g = _GROUPS.get(group)
    if g is None:
        raise RuntimeError(
            "the ranks in lockstep have ended: differentiate inside the rank program, or simulate by vmap"
        )
    run, me = g.run, g.members[rank]
    if run.error is not None:  # another has failed, and this rank goes on in a `finally`
        raise _Abandoned
    shown = ", ".join([f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in xs])
    run.waiting[me], g.brought[me] = _Place(f"{what} over {g.axis!r} of {shown}", user_line()), xs
    if len(g.brought) == len(g.members):
        _conclude(g, compute)
    run.end_turn(me)
    run.await_turn(me)
    if run.error is not None:
        raise _Abandoned
    return run.given.pop(me)


def _conclude(g: _Group, compute: Callable[[list[Tensors], bool], list[Any]]) -> None:
    """Compute for all ranks of a group, and let them go on; unless they called different things."""
    if len({g.run.waiting[r].what for r in g.members}) > 1:
        return  # they wait for ever, which is found when nobody can go on
    with torch.no_grad(), without_function_modes():  # which are of one rank, and this is of all
        results = compute([g.brought[r] for r in g.members], 0 in g.members)
    g.brought.clear()
    for r, result in zip(g.members, results, strict=True):
        g.run.given[r] = result
        del g.run.waiting[r]


def run(shape: Sequence[tuple[str, int]], program: Callable[[tuple[Axis, ...], tuple[Axis, ...]], Any]) -> list[Any]:
    """Run a program on every rank of a mesh of this shape, and list what they return, in rank order.

    Args:
        shape: the name and size of each axis.
        program: `(axes, axes that stand for several) -> result`, what a rank runs.

    Raises:
        DivergedError: if ranks do not meet.
        BaseException: what a rank's program raises, with a note that names the rank.
    """
    this, number = _Run(math.prod([size for _, size in shape])), next(_NUMBERS)
    groups: dict[str, _Group] = {}
    axes = [_axes_of(this, groups, number, shape, rank) for rank in range(this.size)]
    inherit, context = thread_state(), contextvars.copy_context()

    def of_rank(rank: int) -> Any:
        with inherit():
            return context.copy().run(program, *axes[rank])

    _GROUPS.update(groups)
    try:
        with threads_here().running():
            _run_all(this, of_rank)
    finally:
        for key in groups:
            del _GROUPS[key]
    if this.error is not None:
        raise this.error
    return [this.ended[rank] for rank in range(this.size)]


def _run_all(run: _Run, of_rank: Callable[[int], Any]) -> None:
    """Run every rank on a thread of its own, and wait until all are gone."""
    started: list[Future[None]] = []
    try:
        run.begin()
        for rank in range(run.size):
            started.append(threads_here().pool.submit(_run_rank, run, rank, of_rank))
        for thread in started:
            thread.result()
    except BaseException as error:  # Ctrl-C, or no more threads
        run.fail(error)
        run.gone.update(range(len(started), run.size))
        raise


def _run_rank(run: _Run, rank: int, of_rank: Callable[[int], Any]) -> None:
    """Run one rank in its turns, to its end or until another has failed."""
    run.await_turn(rank)
    try:
        if run.error is None:
            run.ended[rank] = of_rank(rank)
    except _Abandoned:
        pass
    except BaseException as error:
        others = ", ".join([f"rank {i} in {place.what}" for i, place in run.waiting.items() if i != rank])
        error.add_note(f"fzero: rank {rank} of {run.size} raised this" + (f"; waiting: {others}" if others else ""))
        run.fail(error)
    finally:
        run.gone.add(rank)
        run.end_turn(rank)


def _axes_of(
    run: _Run, groups: dict[str, _Group], number: int, shape: Sequence[tuple[str, int]], rank: int
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Make a rank's axes, and those that stand for several: one for each way to choose from the mesh's."""
    place, coordinates = rank, []
    for _, size in reversed(shape):
        place, i = divmod(place, size)
        coordinates.insert(0, i)
    alone, several = [], []
    for k in range(1, len(shape) + 1):
        for chosen in itertools.combinations(range(len(shape)), k):
            name = ",".join(shape[i][0] for i in chosen)
            fixed = {i: c for i, c in enumerate(coordinates) if i not in chosen}
            members = _ranks_at(shape, fixed)
            key = f"lockstep/{number}/{name}/{members[0]}"
            groups.setdefault(key, _Group(run, name, members))
            me = members.index(rank)
            (alone if k == 1 else several).append(Axis(name, len(members), key, me, torch.tensor(me)))
    return tuple(alone), tuple(several)


def _ranks_at(shape: Sequence[tuple[str, int]], fixed: dict[int, int]) -> list[int]:
    """List the ranks with these coordinates, in rank order."""
    ranges = [[fixed[i]] if i in fixed else range(size) for i, (_, size) in enumerate(shape)]
    found = []
    for coordinates in itertools.product(*ranges):
        rank = 0
        for c, (_, size) in zip(coordinates, shape, strict=True):
            rank = rank * size + c
        found.append(rank)
    return found
