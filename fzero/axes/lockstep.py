"""Lockstep: ranks as threads of which one runs at a time, and which switch only where they meet in a collective.

Ranks run in rank order from one meeting to the next; the last to arrive computes for all. So a run is deterministic,
random numbers included, any Python runs, a debugger stops one rank while the others wait, and ranks that do not meet
are found at once: when nobody can go on, everybody's place is known.
"""

import contextvars
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero._torch import is_tracing, thread_state, user_line
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
        ...     print(str(error).split(" (")[0])
        ranks diverged: rank 1 ended, and ranks 0, 2 wait in psum over 'dp' of float32 [2]
    """


DivergedError.__module__ = "fzero"


class _Abandoned(BaseException):
    """Ends a rank after another has failed; no Exception, so that a program's own handlers let it through."""


@dataclass(frozen=True)
class _Call:
    """What a rank that waits has called."""

    what: str
    line: str


@dataclass
class _Group:
    """Ranks that meet: those along some axes."""

    world: "_World"
    axis: str
    members: list[int]
    calls: dict[int, tuple[_Call, Tensors]] = field(default_factory=dict)


class _World:
    """The ranks of one run, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.waiting: dict[int, _Call] = {}
        self.ended: dict[int, Any] = {}  # rank -> its result
        self.given: dict[int, Any] = {}  # rank -> what its meeting gave it
        self.error: BaseException | None = None

    def next_after(self, rank: int) -> None:
        """Give the turn to the next rank that can go on."""
        for i in range(1, self.size + 1):
            r = (rank + i) % self.size
            if r not in self.ended and r not in self.waiting:
                self.turns[r].release()
                return
        if len(self.ended) < self.size:
            self.fail(DivergedError(self.report()))

    def fail(self, error: BaseException) -> None:
        """End all ranks."""
        if self.error is None:
            self.error = error
            for turn in self.turns:
                turn.release()

    def places(self) -> dict[str, list[int]]:
        """Tell which ranks are where."""
        found: dict[str, list[int]] = {}
        for r in range(self.size):
            if r in self.waiting:
                found.setdefault(f"{self.waiting[r].what}\n{self.waiting[r].line}", []).append(r)
            elif r in self.ended:
                found.setdefault("ended\n", []).append(r)
        return found

    def report(self) -> str:
        """Say who diverged: the fewest first."""
        said = []
        for place, ranks in sorted(self.places().items(), key=lambda item: len(item[1])):
            what, line = place.split("\n")
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            waits = what if what == "ended" else f"wait{'s' * (len(ranks) == 1)} in {what}"
            said.append(f"{who} {waits}" + (f" ({line})" if line else ""))
        return (
            f"ranks diverged: {', and '.join(said)}. All ranks of an axis call the same collectives in the same "
            "order, with the same shapes and dtypes"
        )


_GROUPS: dict[str, _Group] = {}
_NUMBERS = itertools.count()
_POOL = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="fzero rank")  # as many threads as ranks at a time


def is_lockstep(group: str) -> bool:
    """Tell whether a group's ranks are threads in lockstep."""
    return group.startswith("lockstep/")


def in_lockstep() -> bool:
    """Tell whether this thread is a rank in lockstep."""
    axes = bound()
    return bool(axes) and is_lockstep(axes[0].group)


def same(x: Any, y: Any) -> bool:
    """Tell whether two values are equal to the last bit; tensors' nans are."""
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
    if g.world.error is not None:  # another has failed, and this rank goes on in a `finally`
        raise _Abandoned
    world, me = g.world, g.members[rank]
    shown = ", ".join([f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in xs])
    call = _Call(f"{what} over {g.axis!r} of {shown}", user_line())
    g.calls[me] = call, xs
    world.waiting[me] = call
    if len(g.calls) == len(g.members):
        _conclude(g, compute)
    world.next_after(me)
    world.turns[me].acquire()
    if world.error is not None:
        raise _Abandoned
    return world.given.pop(me)


def _conclude(g: _Group, compute: Callable[[list[Tensors], bool], list[Any]]) -> None:
    """Compute for all ranks of a group, and let them go on; unless they called different things."""
    calls = [g.calls[r] for r in g.members]
    if len({call.what for call, _ in calls}) > 1:
        return  # they wait for ever, which is found when nobody can go on
    with torch.no_grad():
        results = compute([xs for _, xs in calls], 0 in g.members)
    g.calls.clear()
    for r, result in zip(g.members, results, strict=True):
        g.world.given[r] = result
        del g.world.waiting[r]


def run(shape: Sequence[tuple[str, int]], program: Callable[[tuple[Axis, ...], tuple[Axis, ...]], Any]) -> list[Any]:
    """Run a program on every rank of a mesh of this shape, and list what they return, in rank order.

    Args:
        shape: the name and size of each axis.
        program: `(axes, axes that stand for several) -> result`, what a rank runs.

    Raises:
        DivergedError: if ranks do not meet.
        BaseException: what a rank's program raises, with a note that names the rank.
    """
    world = _World(math.prod(size for _, size in shape))
    number = next(_NUMBERS)
    axes = [_axes_of(world, number, shape, r) for r in range(world.size)]
    inherit = thread_state()
    context = contextvars.copy_context()

    def rank(r: int) -> None:
        world.turns[r].acquire()
        try:
            if world.error is None:
                with inherit():
                    world.ended[r] = context.copy().run(program, *axes[r])
                world.next_after(r)
        except _Abandoned:
            pass
        except BaseException as error:
            where = ", ".join([f"rank {i} in {call.what}" for i, call in world.waiting.items()])
            error.add_note(f"fzero: rank {r} of {world.size} raised this" + (f"; waiting: {where}" if where else ""))
            world.fail(error)

    def wait_for_all(x: torch.Tensor) -> torch.Tensor:
        done = [_POOL.submit(rank, r) for r in range(world.size)]
        world.turns[0].release()
        for d in done:
            d.result()
        return x

    try:
        # The level of forward-mode derivatives is the process's: a rank that left its jvp would end that of the others.
        # Within one that outlasts them all they open none.
        nothing = torch.zeros(())
        torch.func.jvp(wait_for_all, (nothing,), (nothing,))
    except BaseException as error:  # Ctrl-C
        world.fail(error)
        raise
    finally:
        for key in [key for key in _GROUPS if key.startswith(f"lockstep/{number}/")]:
            del _GROUPS[key]
    if world.error is not None:
        raise world.error
    return [world.ended[r] for r in range(world.size)]


def _axes_of(
    world: _World, number: int, shape: Sequence[tuple[str, int]], rank: int
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
            _GROUPS.setdefault(key, _Group(world, name, members))
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
