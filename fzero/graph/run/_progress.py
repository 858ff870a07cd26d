"""Progress: a bar on a terminal, for what takes long."""

import os
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["progress"]

T = TypeVar("T")

PATIENCE = 5.0  # seconds that pass without a bar


def progress(items: Iterable[T], total: int) -> Iterator[T]:
    """Yield segments as they are compiled, with a bar on the terminal of a machine's first rank if it takes long.

    Args:
        items: what is compiled.
        total: how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("LOCAL_RANK", "0") != "0":
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("fzero.jit compiles"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("segments", total=total)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        bar.stop()
