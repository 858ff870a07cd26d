"""Python's collector of cycles, paused while a graph is made: it would take a third of the time and find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector, and leave it as it was.

    The nodes of a graph refer to each other, so all of them are cycles, and none of them is garbage yet. The collector
    would visit them again and again. Pauses may overlap, in threads too: the one that found it on puts it on again.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
