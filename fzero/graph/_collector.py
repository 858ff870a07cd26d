"""Python's garbage collector, paused while a graph is built: it would take a third of the time and free nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_collector"]


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause the garbage collector, and restore its state afterwards.

    The nodes of a graph refer to each other: they form cycles, but are not garbage yet. The collector would visit them
    again and again. Pauses may overlap, in threads too: the pause that found the collector enabled enables it again.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
