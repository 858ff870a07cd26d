"""Lockstep: each rank is a thread, one thread runs at a time, and threads switch only at collectives.

Ranks run in rank order from one collective to the next; the last rank to arrive computes for all. So a run is
deterministic, random numbers included. Any Python code runs, and a debugger stops one rank while the others wait.
Diverging ranks are detected at once: when no rank can go on, the error says where each rank is.

A rank may also send a message to one other rank. It goes on at once, like a buffered send between processes. A rank
that receives a message waits until it is sent. Messages that were never received raise an error at the end.
"""

import contextvars
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from fzero._torch import user_line, without_function_modes
from fzero._torch.state import thread_state
from fzero._torch.types import Tensors
from fzero.axes._bound_axes import bound_axes
from fzero.axes._lockstep_run import (
    GROUPS,
    DivergedError,
    LockstepRun,
    MessageKey,
    RankCancelled,
    RankGroup,
    RankStatus,
    describe,
    rank_group,
)
from fzero.axes._rank_threads import process_threads
from fzero.axes._scope import Axis

__all__ = ["DivergedError", "are_equal", "in_lockstep", "is_lockstep", "receive", "rendezvous", "run", "send"]

_NUMBERS = itertools.count()


def is_lockstep(group: str) -> bool:
    """Return whether a group's ranks are threads in lockstep."""
    return group.startswith("lockstep/")


def in_lockstep() -> bool:
    """Return whether this thread is a rank in lockstep."""
    axes = bound_axes()
    return bool(axes) and is_lockstep(axes[0].group)


def are_equal(x: Any, y: Any) -> bool:
    """Return whether two values are equal, where nan equals nan."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and bool(x == y or (x != x and y != y))
    if x.shape != y.shape or x.dtype != y.dtype or x.is_meta != y.is_meta:
        return False
    if x.is_meta:
        return True
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def rendezvous(
    group: str, rank: int, operation: str, xs: Tensors, compute: Callable[[list[Tensors], bool], list[Any]]
) -> Any:
    """Wait until all ranks of a group have called this, and return this rank's result.

    Args:
        group: the group's key.
        rank: this rank's index in the group.
        operation: the name of the operation. All ranks must give the same name, shapes and dtypes.
        xs: this rank's tensors.
        compute: called once, with all ranks' tensors in rank order, and whether rank 0 of the world is in the group;
            returns each rank's result.

    Raises:
        DivergedError: if the ranks do not meet.
        RuntimeError: if a rank's program is traced.
    """
    g = rank_group(group)
    me = g.members[rank]
    g.run.pause(me, RankStatus(f"{operation} over {g.axis!r} of {describe(xs)}", user_line()))
    g.inputs[me] = xs
    if len(g.inputs) == len(g.members):
        _compute_for_all(g, compute)
    return g.run.await_delivery(me)


def _compute_for_all(g: RankGroup, compute: Callable[[list[Tensors], bool], list[Any]]) -> None:
    """Compute the results of all ranks of a group and let the ranks go on, unless their operations differ."""
    if len({g.run.waiting[r].operation for r in g.members}) > 1:
        return  # they wait until no rank can go on, and then diverge
    with torch.no_grad(), without_function_modes():  # modes belong to one rank
        results = compute([g.inputs[r] for r in g.members], 0 in g.members)
    g.inputs.clear()
    for r, result in zip(g.members, results, strict=True):
        g.run.deliver(r, result)


def run(shape: Sequence[tuple[str, int]], program: Callable[[tuple[Axis, ...], tuple[Axis, ...]], Any]) -> list[Any]:
    """Run a program on every rank of a mesh of this shape, and list the results in rank order.

    Args:
        shape: the name and size of each axis.
        program: the rank program, a function of the rank's axes and of the axes that stand for several.

    Raises:
        DivergedError: if ranks do not meet.
        BaseException: the error of a rank's program, with a note that names the rank.
    """
    lockstep_run, number = LockstepRun(math.prod([size for _, size in shape])), next(_NUMBERS)
    groups: dict[str, RankGroup] = {}
    axes = [_make_axes(lockstep_run, groups, number, shape, rank) for rank in range(lockstep_run.size)]
    inherit, context = thread_state(), contextvars.copy_context()

    def run_program(rank: int) -> Any:
        with inherit():
            return context.copy().run(program, *axes[rank])

    GROUPS.update(groups)
    try:
        with process_threads().run_context():
            _run_all(lockstep_run, run_program)
    finally:
        for key in groups:
            del GROUPS[key]
    if lockstep_run.error is not None:
        raise lockstep_run.error
    _check_received(groups.values())
    return [lockstep_run.results[rank] for rank in range(lockstep_run.size)]


def _run_all(run: LockstepRun, run_program: Callable[[int], Any]) -> None:
    """Run every rank on its own thread, and wait until all threads have ended."""
    futures: list[Future[None]] = []
    try:
        run.begin()
        for rank in range(run.size):
            futures.append(process_threads().pool.submit(_run_rank, run, rank, run_program))
        for future in futures:
            future.result()
    except BaseException as error:  # Ctrl-C, or no more threads
        run.fail(error)
        run.ended.update(range(len(futures), run.size))
        raise


def _run_rank(run: LockstepRun, rank: int, run_program: Callable[[int], Any]) -> None:
    """Run one rank to its end, or until another rank has failed."""
    run.await_turn(rank)
    try:
        if run.error is None:
            run.results[rank] = run_program(rank)
    except RankCancelled:
        pass
    except BaseException as error:
        peers = ", ".join([f"rank {i} in {status.operation}" for i, status in run.waiting.items() if i != rank])
        error.add_note(f"fzero: rank {rank} of {run.size} raised this" + (f"; waiting: {peers}" if peers else ""))
        run.fail(error)
    finally:
        run.ended.add(rank)
        run.end_turn(rank)


def _make_axes(
    run: LockstepRun, groups: dict[str, RankGroup], number: int, shape: Sequence[tuple[str, int]], rank: int
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return a rank's axes, and an axis for each combination of several axes of the mesh."""
    remaining_rank = rank
    coordinates: list[int] = []
    for _, size in reversed(shape):
        remaining_rank, i = divmod(remaining_rank, size)
        coordinates.insert(0, i)
    single, joint = [], []
    for k in range(1, len(shape) + 1):
        for subset in itertools.combinations(range(len(shape)), k):
            name = ",".join(shape[i][0] for i in subset)
            fixed_coordinates = {i: c for i, c in enumerate(coordinates) if i not in subset}
            members = _ranks_at(shape, fixed_coordinates)
            key = f"lockstep/{number}/{name}/{members[0]}"
            groups.setdefault(key, RankGroup(run, name, members))
            me = members.index(rank)
            (single if k == 1 else joint).append(
                Axis(name, size=len(members), group=key, rank=me, token=torch.tensor(me, device="cpu"))
            )
    return tuple(single), tuple(joint)


def _ranks_at(shape: Sequence[tuple[str, int]], fixed_coordinates: dict[int, int]) -> list[int]:
    """List the ranks that have these coordinates along the fixed axes, in rank order."""
    ranges = [[fixed_coordinates[i]] if i in fixed_coordinates else range(size) for i, (_, size) in enumerate(shape)]
    ranks = []
    for coordinates in itertools.product(*ranges):
        rank = 0
        for c, (_, size) in zip(coordinates, shape, strict=True):
            rank = rank * size + c
        ranks.append(rank)
    return ranks


def send(group: str, rank: int, to: int, tag: int, x: torch.Tensor) -> None:
    """Send a tensor to another rank of a group.

    Args:
        group: the group's key.
        rank: the sender's index in the group.
        to: the receiver's index in the group.
        tag: a number that identifies the message for the receiver.
        x: a tensor of any shape.
    """
    g, key = rank_group(group), MessageKey(rank, to, tag)
    receiver = g.members[to]
    if g.expected.get(receiver) == key:
        del g.expected[receiver]
        g.run.deliver(receiver, x.detach().clone())
    else:
        g.messages.setdefault(key, deque()).append(x.detach().clone())


def receive(group: str, rank: int, source: int, tag: int, like: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor from another rank of a group.

    Args:
        group: the group's key.
        rank: the receiver's index in the group.
        source: the sender's index in the group.
        tag: the tag of the message.
        like: a tensor of the expected shape and dtype.

    Raises:
        ValueError: if the message has another shape or dtype.
        DivergedError: if no rank sends the message.
    """
    g, key = rank_group(group), MessageKey(source, rank, tag)
    if g.messages.get(key):
        x = g.messages[key].popleft()
    else:
        me = g.members[rank]
        name = (
            f"receive of a message from rank {g.members[source]} with tag {tag} over {g.axis!r} of {describe([like])}"
        )
        g.run.pause(me, RankStatus(name, user_line()))
        g.expected[me] = key
        x = g.run.await_delivery(me)
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(
            f"the message from rank {g.members[source]} to rank {g.members[rank]} with tag {tag} over {g.axis!r} is "
            f"{describe([x])}, and the receiver expects {describe([like])}: "
            "pass receive a tensor like the one that is sent"
        )
    return x


def _check_received(groups: Iterable[RankGroup]) -> None:
    """Check that each message was received, after all ranks have ended.

    Raises:
        DivergedError: if a message was not received. The text names its sender and receiver.
    """
    for g in groups:
        for key, messages in g.messages.items():
            if messages:
                raise DivergedError(
                    f"ranks diverged: rank {g.members[key.sender]} sent rank {g.members[key.receiver]} a message "
                    f"with tag {key.tag} over {g.axis!r} of {describe(messages)}, and all ended before it was "
                    "received: call fzero.collectives.receive on the receiver, or send no such message"
                )
