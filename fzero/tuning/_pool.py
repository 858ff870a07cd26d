"""Processes that plan: forked from this one, which has torch and the user's functions already."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

__all__ = ["pool_of"]


class _Here(Executor):
    """Calls a function at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))  # what it raises is raised here
        return future


@contextmanager
def pool_of(count: int, run: Callable[[Any], Any]) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield what starts `run` on a value, here or on forked processes, and returns its future.

    Args:
        count: of processes; 1 for none beside this one.
        run: a function, which the processes have from the fork, since a user's cannot be sent.
    """
    if count == 1:
        yield lambda given: _Here().submit(run, given)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork keeps none of its parent's threads
    pool = ProcessPoolExecutor(count, get_context("fork"), _inherit, (run,))
    try:
        yield lambda given: pool.submit(_run, given)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


_inherited: list[Callable[[Any], Any]] = []  # of a forked process: what its parent gave it


def _inherit(run: Callable[[Any], Any]) -> None:
    _inherited.append(run)


def _run(given: Any) -> Any:
    return _inherited[-1](given)
