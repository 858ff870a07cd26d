"""Agents of torchrun with elastic runs, each as a host that can be lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.distributed.launch import ROOT, environment

__all__ = ["PATIENCE", "agent", "events", "lose", "starts", "wait_for"]

PATIENCE = 120.0  # seconds; what is waited for takes some


@contextlib.contextmanager
def agent(root: Path, *options: str, host: str = "host", **script: Any) -> Iterator[subprocess.Popen[str]]:
    """Run one agent of torchrun, with its ranks, in a session of its own: a host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *options]
    words = [str(x) for name, value in script.items() for x in (f"--{name}", value)]
    with open(root / f"out.{host}", "a") as out:
        process = subprocess.Popen(
            [*command, "-m", "tests.elastic.on_processes", str(root), "--host", host, *words],
            cwd=ROOT,
            env={
                **environment(),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },  # else a host that joins ends: docs/survive.md
            stdout=out,
            stderr=out,
            start_new_session=True,
            text=True,
        )
    try:
        yield process
    finally:
        lose(process)


def lose(process: subprocess.Popen[str]) -> None:
    """Kill an agent and its ranks: each rank has a session of its own."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    for pid in [process.pid, *map(int, children.stdout.split())]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def events(root: Path) -> list[dict[str, Any]]:
    text = (root / "log").read_text() if (root / "log").exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for(root: Path, is_there: Callable[[list[dict[str, Any]]], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_there(events(root)):
        assert time.monotonic() < end, f"{events(root)[-5:]}\n" + "\n".join(
            [path.read_text()[-6000:] for path in root.glob("out.*")]
        )
        time.sleep(0.05)


def starts(root: Path) -> list[list[int]]:
    """The steps of rank 0 in each start of the run."""
    results: list[list[int]] = []
    for event in [e for e in events(root) if e["rank"] == 0]:
        if "size" in event:
            results.append([])
        elif "step" in event:
            results[-1].append(event["step"])
    return results
