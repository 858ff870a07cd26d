"""Processes that plan. They are forked, so that they have torch and the user's functions already."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from fzero._notice import warn_once

__all__ = ["open_pool"]


class _InProcess(Executor):
    """Calls a function at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))  # its exceptions are raised here
        return future


@contextmanager
def open_pool(
    count: int, run: Callable[[Any], Any], lookup: Callable[[Any], Any] = lambda value: None
) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield a function that starts `run` on a value, in this process or a forked one, and returns the future.

    Processes start at the first value whose result is not known.

    A process that has computed gradients on a build of torch for GPUs has threads that no fork survives. Then all calls
    run in this process, which a notice says.

    Args:
        count: the number of processes; with 1 this process runs all calls.
        run: the function. Processes inherit it by the fork, since a user's function may not pickle.
        lookup: returns the result for a value if it is known already, else None.
    """
    with ExitStack() as stack:
        processes: list[Callable[[Any], Future[Any]]] = []

        def start(value: Any) -> Future[Any]:
            result = lookup(value)
            if result is not None:
                return _InProcess().submit(lambda: result)
            if not processes:
                processes.append(stack.enter_context(_process_pool(count, run)))
            return processes[0](value)

        yield start


@contextmanager
def _process_pool(count: int, run: Callable[[Any], Any]) -> Iterator[Callable[[Any], Future[Any]]]:
    """Yield a function that starts `run` on a value in one of `count` processes, as `open_pool` describes."""
    if count > 1 and not _can_fork():
        warn_once(
            f"fzero.tune: workers={count}: this process has computed gradients, and this build of torch can compute "
            "none in a fork of it. So it plans in one process; call tune before the first gradient to plan in several"
        )
        count = 1
    if count == 1:
        yield lambda value: _InProcess().submit(run, value)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of a parent do not survive a fork
    pool = ProcessPoolExecutor(count, get_context("fork"), _inherit_function, (run,))
    try:
        yield lambda value: pool.submit(_call_in_worker, value)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _can_fork() -> bool:
    """Return whether a process that is forked now can compute gradients: autograd refuses if its threads are lost."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            pool.submit(_check_threads).result()
        except RuntimeError:
            return False
    return True


def _check_threads() -> None:
    with torch.enable_grad():  # not torch.func, whose first use imports for seconds
        torch.zeros((), device="cpu", requires_grad=True).sin().backward()


_functions: list[Callable[[Any], Any]] = []  # in a forked process: the functions that it inherited


def _inherit_function(run: Callable[[Any], Any]) -> None:
    _functions.append(run)


def _call_in_worker(value: Any) -> Any:
    return _functions[-1](value)
