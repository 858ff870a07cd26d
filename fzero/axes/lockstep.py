"""Lockstep: ranks as threads of which one runs at a time, and which switch only where they meet in a collective.

Ranks run in rank order from one meeting to the next; the last to arrive computes for all. So a run is deterministic,
random numbers included. Any Python runs, and a debugger stops one rank while the others wait. Ranks that do not meet
are found at once: when nobody can go on, everybody's place is known.
"""

import contextvars
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from fzero._torch import user_line, without_function_modes
from fzero._torch.state import thread_state
from fzero.axes._axis import Axis
from fzero.axes._run import (
    GROUPS,
    Abandoned,
    DivergedError,
    LockstepRun,
    RankGroup,
    RankStatus,
    Tensors,
    group_of,
    shown,
    threads_here,
)
from fzero.axes._scope import bound
from fzero.axes.mailbox import check_received

__all__ = ["DivergedError", "in_lockstep", "is_lockstep", "meet", "run", "same"]

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
    g = group_of(group)
    me = g.members[rank]
    g.run.pause(me, RankStatus(f"{what} over {g.axis!r} of {shown(xs)}", user_line()))
    g.brought[me] = xs
    if len(g.brought) == len(g.members):
        _conclude(g, compute)
    return g.run.await_gift(me)


def _conclude(g: RankGroup, compute: Callable[[list[Tensors], bool], list[Any]]) -> None:
    """Compute for all ranks of a group, and let them go on; unless they called different things."""
    if len({g.run.waiting[r].what for r in g.members}) > 1:
        return  # they wait for ever, which is found when nobody can go on
    with torch.no_grad(), without_function_modes():  # which are of one rank, and this is of all
        results = compute([g.brought[r] for r in g.members], 0 in g.members)
    g.brought.clear()
    for r, result in zip(g.members, results, strict=True):
        g.run.give(r, result)


def run(shape: Sequence[tuple[str, int]], program: Callable[[tuple[Axis, ...], tuple[Axis, ...]], Any]) -> list[Any]:
    """Run a program on every rank of a mesh of this shape, and list what they return, in rank order.

    Args:
        shape: the name and size of each axis.
        program: `(axes, axes that stand for several) -> result`, what a rank runs.

    Raises:
        DivergedError: if ranks do not meet.
        BaseException: what a rank's program raises, with a note that names the rank.
    """
    this, number = LockstepRun(math.prod([size for _, size in shape])), next(_NUMBERS)
    groups: dict[str, RankGroup] = {}
    axes = [_axes_of(this, groups, number, shape, rank) for rank in range(this.size)]
    inherit, context = thread_state(), contextvars.copy_context()

    def of_rank(rank: int) -> Any:
        with inherit():
            return context.copy().run(program, *axes[rank])

    GROUPS.update(groups)
    try:
        with threads_here().running():
            _run_all(this, of_rank)
    finally:
        for key in groups:
            del GROUPS[key]
    if this.error is not None:
        raise this.error
    check_received(groups.values())
    return [this.ended[rank] for rank in range(this.size)]


def _run_all(run: LockstepRun, of_rank: Callable[[int], Any]) -> None:
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


def _run_rank(run: LockstepRun, rank: int, of_rank: Callable[[int], Any]) -> None:
    """Run one rank in its turns, to its end or until another has failed."""
    run.await_turn(rank)
    try:
        if run.error is None:
            run.ended[rank] = of_rank(rank)
    except Abandoned:
        pass
    except BaseException as error:
        others = ", ".join([f"rank {i} in {place.what}" for i, place in run.waiting.items() if i != rank])
        error.add_note(f"fzero: rank {rank} of {run.size} raised this" + (f"; waiting: {others}" if others else ""))
        run.fail(error)
    finally:
        run.gone.add(rank)
        run.end_turn(rank)


def _axes_of(
    run: LockstepRun, groups: dict[str, RankGroup], number: int, shape: Sequence[tuple[str, int]], rank: int
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
            groups.setdefault(key, RankGroup(run, name, members))
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
