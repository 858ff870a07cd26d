"""How the benchmarks write their results: Markdown tables, under a line that says what they were measured on."""

import datetime
import os
import pathlib
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines)


def machine() -> str:
    """Name the processor, torch and the day."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()
    return f"{cores}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}"


def load() -> str:
    """Say how busy the machine was: the number of processes that ran or waited, over the last 5 minutes."""
    return f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"


def quartiles(times: Sequence[float]) -> str:
    """Show the median of some seconds, and the first and the third quartile behind it."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return f"{median:.2f} ({first:.2f} to {third:.2f})"


def publish(script: str, command: str, parts: Sequence[str], write: bool) -> None:
    """Print the parts, and with `write` keep them beside the script, as its name with .md.

    Args:
        script: the script's `__file__`.
        command: what was run.
        parts: paragraphs and tables.
        write: whether to write the file.
    """
    path = pathlib.Path(script).with_suffix(".md")
    text = "\n\n".join([f"# {path.stem}", f"`{command}`, on {machine()}, {load()}.", *parts]) + "\n"
    print(text)
    if write:
        path.write_text(text)
