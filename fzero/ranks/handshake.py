"""How the processes of a world find each other in a store that may hold what the dead have left there.

torchrun's agent keeps one store for all generations of its workers, so a key may be of an earlier one. Therefore each
rank says hello with a fresh number, and rank 0 answers it with a fresh number of its own, the world's. Only a rank 0
that lives can answer a number that is new. Restart counts do not do: ranks can disagree on them (pytorch#135712).
"""

import datetime
import secrets
import time
from typing import Any

from torch.distributed import DistNetworkError

__all__ = ["AbsentError", "shake_hands"]

PAUSE = 0.01  # seconds between two looks of rank 0


class AbsentError(RuntimeError):
    """A rank did not come to the meeting in time."""


def shake_hands(store: Any, rank: int, size: int, timeout: float) -> str:
    """Meet the other ranks in a store, and agree with them on a prefix that no other world has.

    Args:
        store: a `torch.distributed.Store`, whatever it holds already.
        rank: this process's rank.
        size: the number of ranks.
        timeout: for how many seconds rank 0 waits for the others, and they for rank 0.

    Returns:
        The prefix, the same on all ranks.

    Raises:
        AbsentError: on every rank that came, if one did not come in time. The message names it.
        DistNetworkError: if the store goes away meanwhile.
    """
    return _as_rank_0(store, size, timeout) if rank == 0 else _as_another(store, rank, timeout)


def _as_rank_0(store: Any, size: int, timeout: float) -> str:
    """Answer all who say hello until each of them has come, or the time is over; then tell all which it is."""
    world, end = f"fzero/{secrets.token_hex(8)}", time.monotonic() + timeout
    answered: dict[int, bytes] = {}
    absent = list(range(1, size))
    while absent:
        for rank in absent:
            _answer(store, rank, world, answered)
        absent = [rank for rank in absent if not store.check([f"{world}/arrived/{rank}"])]
        if absent and time.monotonic() > end:
            break
        time.sleep(PAUSE if absent else 0)
    store.set(f"{world}/absent", str(absent[0]) if absent else "")
    if absent:
        raise AbsentError(_absent(absent[0]))
    return world


def _answer(store: Any, rank: int, world: str, answered: dict[int, bytes]) -> None:
    """Answer a rank's hello, if there is one that is new; it may be of a rank that died, which does not hear it."""
    if store.check([f"fzero/hello/{rank}"]):
        hello = store.get(f"fzero/hello/{rank}")
        if answered.get(rank) != hello:
            store.set(f"fzero/answer/{hello.decode()}", world)
            answered[rank] = hello


def _as_another(store: Any, rank: int, timeout: float) -> str:
    """Say hello, and wait for the answer of rank 0; then it is rank 0 who knows when the time is over."""
    hello = secrets.token_hex(8)
    store.set(f"fzero/hello/{rank}", hello)
    world = _awaited(store, f"fzero/answer/{hello}", timeout, f"rank {rank} met no rank 0")
    store.set(f"{world}/arrived/{rank}", "")
    absent = _awaited(store, f"{world}/absent", 2 * timeout, f"rank {rank} lost rank 0, which did not say who is there")
    if absent:
        raise AbsentError(_absent(int(absent)))
    return world


def _awaited(store: Any, key: str, timeout: float, otherwise: str) -> str:
    """Wait for a key, and return its value.

    Raises:
        AbsentError: if it is not set in time. Says what `otherwise` says.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=timeout))
    except DistNetworkError:  # the store is gone, not late
        raise
    except RuntimeError as error:
        raise AbsentError(otherwise) from error
    return store.get(key).decode()


def _absent(rank: int) -> str:
    return f"rank {rank} did not arrive"
