"""Progress: a bar on a terminal, and elsewhere a line, for what takes long."""

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

__all__ = ["progress"]

T = TypeVar("T")

NO_BAR = 5.0  # seconds that pass without a bar


def progress(items: Iterable[T], total: int) -> Iterator[T]:
    """Yield segments as they are compiled. If it takes long, a machine's first rank says how far it is.

    It has a bar on a terminal. Where there is none, one line on stderr says what the step waits for.

    Args:
        items: what is compiled.
        total: how many there are.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield from items
        return
    if not console.is_terminal:
        yield from _with_a_line(items, total, console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("fzero.jit compiles"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("segments", total=total)
    timer = threading.Timer(NO_BAR, bar.start)
    timer.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        timer.cancel()
        bar.stop()


def _with_a_line(items: Iterable[T], total: int, console: Any) -> Iterator[T]:
    segments = f"{total} segment{'s' * (total != 1)}"
    text = f'fzero.jit compiles {segments} before the first step, once on a machine; backend="auto" does not wait'
    timer = threading.Timer(NO_BAR, console.print, [text], {"soft_wrap": True, "highlight": False})
    timer.daemon = True
    timer.start()
    try:
        yield from items
    finally:
        timer.cancel()
