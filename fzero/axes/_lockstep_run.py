"""The state of one lockstep run: where each rank is, which rank runs, and the messages that were sent."""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero._format import format_tensor
from fzero._notice import trouble_link
from fzero._torch import is_tracing
from fzero._torch.process_state import RankSettings
from fzero._torch.types import Tensors
from fzero.axes._rank_threads import process_threads

__all__ = [
    "GROUPS",
    "DivergedError",
    "LockstepRun",
    "MessageKey",
    "RankCancelled",
    "RankGroup",
    "RankStatus",
    "describe",
    "rank_group",
]


class DivergedError(RuntimeError):
    """Ranks in lockstep did not meet: they called different collectives, or some ended while others waited.

    On real processes the same program would hang, or receive wrong messages.

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


DivergedError.__module__ = "fzero.errors"  # where a pickle finds it


class RankCancelled(BaseException):
    """Ends a rank after another rank has failed; not an Exception, so that the program's handlers let it pass."""


class RankStatus(NamedTuple):
    """The operation in which a rank waits, and the user's line; or `_ENDED`."""

    operation: str
    source_line: str


_ENDED = RankStatus("ended", "")


class MessageKey(NamedTuple):
    """The key of a message: the sender's and the receiver's index in their group, and a tag."""

    sender: int
    receiver: int
    tag: int


def describe(xs: Tensors) -> str:
    """Return the dtypes and shapes of tensors as text."""
    return ", ".join([format_tensor(x.dtype, x.shape) for x in xs])


@dataclass
class RankGroup:
    """The ranks along some axes, which meet in collectives.

    Attributes:
        run: the run of these ranks.
        axis: the name of the axes.
        members: the ranks, in order.
        inputs: for each rank that waits in a collective, its tensors.
        messages: the messages that were sent and not yet received, in the order of sending.
        expected: for each rank that waits for a message, the message's key.
    """

    run: "LockstepRun"
    axis: str
    members: list[int]
    inputs: dict[int, Tensors] = field(default_factory=dict)
    messages: dict[MessageKey, deque[torch.Tensor]] = field(default_factory=dict)
    expected: dict[int, MessageKey] = field(default_factory=dict)


class LockstepRun:
    """One run of a program on all ranks, of which one runs at a time.

    Attributes:
        size: the number of ranks.
        waiting: for each rank that waits, the operation in which it waits.
        deliveries: for each rank that can go on, the result of the operation in which it waited.
        results: for each rank that has ended without an error, its result.
        ended: the ranks whose threads have ended, with a result or without.
        error: the first failure, after which all ranks end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: dict[int, RankStatus] = {}
        self.deliveries: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.ended: set[int] = set()
        self.error: BaseException | None = None
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._settings = [RankSettings() for _ in range(size)]

    def begin(self) -> None:
        """Let the first rank run."""
        self._turns[0].release()

    def await_turn(self, rank: int) -> None:
        """Wait until it is this rank's turn to run."""
        self._turns[rank].acquire()
        self._settings[rank].apply()

    def end_turn(self, rank: int) -> None:
        """Let the next rank that can go on run; if there is none, the ranks have diverged."""
        process_threads().record_changes(self._settings[rank].undo())
        next_rank = self._next_rank(rank)
        if next_rank is None and len(self.ended) < self.size:
            self.fail(DivergedError(self.report()))
            next_rank = self._next_rank(rank)
        if next_rank is not None:
            self._turns[next_rank].release()

    def _next_rank(self, rank: int) -> int | None:
        """Return the next rank that can go on: one that does not wait, or any rank after a failure."""
        ranks = ((rank + i) % self.size for i in range(1, self.size + 1))
        return next((r for r in ranks if r not in self.ended and (self.error or r not in self.waiting)), None)

    def pause(self, rank: int, status: RankStatus) -> None:
        """Record that a rank waits in an operation, until a result is delivered to it."""
        self.waiting[rank] = status

    def deliver(self, rank: int, result: Any) -> None:
        """Deliver the result for which a rank waits, so that it can go on."""
        self.deliveries[rank] = result
        del self.waiting[rank]

    def await_delivery(self, rank: int) -> Any:
        """Let other ranks run until a result was delivered to this rank, and return the result."""
        self.end_turn(rank)
        self.await_turn(rank)
        if self.error is not None:
            raise RankCancelled
        return self.deliveries.pop(rank)

    def fail(self, error: BaseException) -> None:
        """End all ranks, one at a time, so that their clean-ups do not interfere."""
        self.error = self.error or error

    def statuses(self) -> dict[RankStatus, list[int]]:
        """Return the ranks in each status, of those that wait or have ended."""
        statuses: dict[RankStatus, list[int]] = {}
        for rank in range(self.size):
            if rank in self.waiting or rank in self.results:
                statuses.setdefault(self.waiting.get(rank, _ENDED), []).append(rank)
        return statuses

    def report(self) -> str:
        """Return the message that says where each rank is, the smallest group of ranks first."""
        groups = sorted(self.statuses().items(), key=lambda item: len(item[1]))
        texts = [_status_text(status, ranks) for status, ranks in groups]
        return (
            f"ranks diverged: {', and '.join(texts)}. All ranks of an axis call the same collectives in the same "
            f"order, with the same shapes and dtypes{trouble_link('a-hang')}"
        )


def _status_text(status: RankStatus, ranks: list[int]) -> str:
    """Return where ranks are, as text: "ranks 0, 2 wait in psum over 'dp' of float32 [2] (train.py:7)"."""
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    if status == _ENDED:
        return f"{names} ended"
    return f"{names} wait{'s' * (len(ranks) == 1)} in {status.operation}" + (
        f" ({status.source_line})" if status.source_line else ""
    )


GROUPS: dict[str, RankGroup] = {}
"""The groups of the ranks of all active runs, by their keys."""


def rank_group(key: str) -> RankGroup:
    """Return a group of ranks of an active run.

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
    if GROUPS[key].run.error is not None:  # another rank has failed, and this one runs its `finally` clauses
        raise RankCancelled
    return GROUPS[key]
