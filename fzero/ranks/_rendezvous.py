"""The processes of a world find each other in a store that may hold keys of dead processes."""

import contextlib
import datetime
import logging
import secrets
import threading
import time
from concurrent.futures import Future, TimeoutError
from typing import Any

from torch.distributed import (
    DistNetworkError,  # pyright: ignore[reportPrivateImportUsage]
)

__all__ = ["MissingRankError", "rendezvous", "store_patience"]


_POLL_SECONDS = 0.01  # between two polls of rank 0
_MIN_PATIENCE_SECONDS = 50.0  # the patience: seconds in which nobody comes, after which the others give up
_PATIENCE_DIVISOR = 6  # the part of a long timeout that is the patience
_WARNING_DIVISOR = 6  # the part of the patience after which the log says which ranks have not come
_SIGNS_OF_LIFE = 10  # that rank 0 gives during the patience
_NOT_HERE = "%s did not come to the first mesh within %.0f s; this rank gives up %.0f s after the last one has come"
_log = logging.getLogger("fzero")


class MissingRankError(RuntimeError):
    """A rank did not come to the rendezvous in time, or did not send a text.

    Attributes:
        rank: the rank; None at the rendezvous, where the message names it.
        seconds: how long this rank waited for it; 0 at the rendezvous.
    """

    def __init__(self, message: str, rank: int | None = None, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.rank, self.seconds = rank, seconds


def rendezvous(store: Any, rank: int, size: int, timeout: float) -> str:
    """Wait for all ranks in a store, and agree with them on a prefix that no other world has.

    Args:
        store: a `torch.distributed.Store`, which may hold keys of earlier worlds.
        rank: this process's rank.
        size: the number of ranks.
        timeout: how long rank 0 waits for the other ranks at most, in seconds. All give up sooner if nobody comes:
            `store_patience` says when.

    Returns:
        The prefix, the same on all ranks.

    Raises:
        MissingRankError: on every rank that arrived, if a rank did not in time. The message names the absent rank.
        DistNetworkError: if the connection to the store is lost.
    """
    if rank == 0:
        return _as_rank_0(store, size, timeout, store_patience(timeout))
    return _as_other_rank(store, rank, store_patience(timeout))


def store_patience(timeout: float) -> float:
    """Return after how many seconds in which no rank comes the others give up."""
    return min(timeout, max(timeout / _PATIENCE_DIVISOR, _MIN_PATIENCE_SECONDS))


def _as_rank_0(store: Any, size: int, timeout: float, patience: float) -> str:
    """Answer every hello until all ranks have arrived or the time is over; then publish the outcome."""
    prefix = f"fzero/{secrets.token_hex(8)}"
    absent = _await_ranks(store, prefix, size, timeout, patience)
    store.set(f"{prefix}/absent", str(absent[0]) if absent else "")
    if absent:
        read_keys = [f"{prefix}/read/{rank}" for rank in range(1, size) if rank not in absent]
        with contextlib.suppress(RuntimeError):  # this process may serve the store, and end
            if read_keys:
                store.wait(read_keys, datetime.timedelta(seconds=patience / _SIGNS_OF_LIFE))
        raise MissingRankError(_absent_message(absent[0]))
    return prefix


def _await_ranks(store: Any, prefix: str, size: int, timeout: float, patience: float) -> list[int]:
    """Answer every hello until all ranks have arrived or the time is over, and return the absent ranks."""
    start = time.monotonic()
    answers: dict[int, bytes] = {}
    absent, now, last_arrival, next_sign, has_warned = list(range(1, size)), start, start, start, False
    while absent:
        if now >= next_sign:  # before the first answer: who waits for this rank knows that it lives
            store.set(f"{prefix}/alive", str(now))
            next_sign = now + patience / _SIGNS_OF_LIFE
        for rank in absent:
            _answer_hello(store, rank, prefix, answers)
        still_absent, now = [rank for rank in absent if not store.check([f"{prefix}/arrived/{rank}"])], time.monotonic()
        absent, last_arrival = still_absent, last_arrival if len(still_absent) == len(absent) else now
        if absent and now > min(start + timeout, last_arrival + patience):
            break
        if absent and not has_warned and now > last_arrival + patience / _WARNING_DIVISOR:
            has_warned = True
            _warn_about_absent(absent, patience)
        time.sleep(_POLL_SECONDS if absent else 0)
    return absent


def _warn_about_absent(absent: list[int], patience: float) -> None:
    names = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:10]))}{', ...' * (len(absent) > 10)}"
    _log.warning(_NOT_HERE, names, patience / _WARNING_DIVISOR, patience)


def _answer_hello(store: Any, rank: int, prefix: str, answers: dict[int, bytes]) -> None:
    """Answer a rank's hello, if it is new. A dead rank may have sent it, and never reads the answer."""
    if store.check([f"fzero/hello/{rank}"]):
        hello = store.get(f"fzero/hello/{rank}")
        if answers.get(rank) != hello:
            store.set(f"fzero/answer/{hello.decode()}", prefix)
            answers[rank] = hello


def _as_other_rank(store: Any, rank: int, patience: float) -> str:
    """Send a hello, and wait for an answer. From then on rank 0 decides when the time is over, while it lives."""
    hello = secrets.token_hex(8)
    store.set(f"fzero/hello/{rank}", hello)
    message = f"rank {rank} did not reach rank 0"
    try:
        prefix = _wait_for(store, f"fzero/answer/{hello}", patience / _WARNING_DIVISOR, patience, message)
    except MissingRankError:
        _log.warning(_NOT_HERE, "rank 0", patience / _WARNING_DIVISOR, patience)
        prefix = _wait_for(store, f"fzero/answer/{hello}", patience * (1 - 1 / _WARNING_DIVISOR), patience, message)
    store.set(f"{prefix}/arrived/{rank}", "")
    absent = _await_outcome(store, rank, prefix, patience)
    if absent:
        store.set(f"{prefix}/read/{rank}", "")
        raise MissingRankError(_absent_message(int(absent)))
    return prefix


def _await_outcome(store: Any, rank: int, prefix: str, patience: float) -> str:
    """Wait for the outcome of rank 0 while it gives signs of life; return the absent rank, "" for none."""
    sign, since, message = "", time.monotonic(), f"rank {rank} lost rank 0 during the rendezvous"
    while True:
        try:
            return _wait_for(store, f"{prefix}/absent", patience / _SIGNS_OF_LIFE, patience, message)
        except MissingRankError:
            newest = _wait_for(store, f"{prefix}/alive", patience / _SIGNS_OF_LIFE, patience, message)
            if newest == sign and time.monotonic() > since + patience:
                raise
            sign, since = newest, since if newest == sign else time.monotonic()


def _wait_for(store: Any, key: str, timeout: float, patience: float, message: str) -> str:
    """Wait for a key, and return its value.

    A store whose host is dark does not end a wait in time, so the wait has its own thread, for at most `patience`.

    Raises:
        MissingRankError: with `message`, if the key is not set in time.
    """
    value: Future[bytes] = Future()

    def run() -> None:
        try:
            store.wait([key], datetime.timedelta(seconds=timeout))
            value.set_result(store.get(key))
        except BaseException as error:
            value.set_exception(error)

    threading.Thread(target=run, daemon=True, name="fzero meets").start()
    try:
        return value.result(patience).decode()
    except DistNetworkError:  # the connection is lost; this is not a timeout
        raise
    except (RuntimeError, TimeoutError) as error:
        raise MissingRankError(message) from error


def _absent_message(rank: int) -> str:
    return f"rank {rank} did not arrive"
