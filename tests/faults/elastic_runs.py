"""Elastic runs under torchrun that lose ranks or hosts at random moments: they end as one uninterrupted run does."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.distributed.launch import free_port
from tests.elastic.agents import PATIENCE, agent, events, lose, starts, wait_for
from tests.elastic.helpers import final

__all__ = ["KINDS", "run"]

KINDS = ("elastic, ranks killed", "elastic, a host lost and back")
COPIES = 2  # steps between copies in memory
STEPS = 24


def run(kind: str, rng: random.Random) -> list[str]:
    """Run one, and list what is wrong with it."""
    root = Path(tempfile.mkdtemp(prefix="elastic-"))
    try:
        (kill_ranks if kind == KINDS[0] else host_lost)(root, rng)
        wrong = judge(root)
    except AssertionError as error:
        wrong = [str(error)]
    if not wrong:
        shutil.rmtree(root)
    return [f"{kind}, {root}: {line}" for line in wrong]


def kill_ranks(root: Path, rng: random.Random) -> None:
    """Kill one of the ranks at a random moment, once or twice."""
    count = rng.choice((2, 3))
    with agent(root, "--standalone", f"--nproc-per-node={count}", slow=0.1, steps=STEPS) as process:
        for _ in range(rng.choice((1, 2))):
            wait_for_steps(root, rng.randrange(1, 6))
            time.sleep(rng.uniform(0, 0.3))
            kill(root, rng)
        wait_for_steps(root, 1)
        (root / "hurry").touch()
        assert process.wait(PATIENCE) == 0, (root / "out.host").read_text()[-3000:]


def host_lost(root: Path, rng: random.Random) -> None:
    """Lose a host with its memory, and let another join."""
    times = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=elastic", endpoint)
    serves, joins = [("--rdzv-conf", f"{times},is_host={flag}") for flag in ("true", "false")]
    with agent(root, *options, *serves, host="a", slow=0.3, steps=80) as first:
        with agent(root, *options, *joins, host="b", slow=0.3, steps=80) as second:
            wait_for_steps(root, rng.randrange(2, 9))
            time.sleep(rng.uniform(0, 0.6))
            lose(second)
            shutil.rmtree(root / "memory" / "fzero" / "b", ignore_errors=True)
            wait_for(root, lambda log: any(e.get("size") == 1 for e in log))
            event_count = len(events(root))
        wait_for(root, lambda log: any("step" in e for e in log[event_count:]))
        with agent(root, *options, *joins, host="b", slow=0.3, steps=80) as third:
            wait_for(root, lambda log: any(e.get("size") == 2 for e in log[event_count:]))
            (root / "hurry").touch()
            assert first.wait(PATIENCE) == third.wait(PATIENCE) == 0, (root / "out.a").read_text()[-3000:]


def wait_for_steps(root: Path, steps: int) -> None:
    """Wait for so many steps of the newest start."""
    wait_for(root, lambda log: len(newest(log)) >= steps)


def newest(actual: list[dict[str, Any]]) -> list[dict[str, Any]]:
    begin = max([i for i, e in enumerate(actual) if e["rank"] == 0 and "size" in e], default=len(actual))
    return [e for e in actual[begin:] if e["rank"] == 0 and "step" in e]


def kill(root: Path, rng: random.Random) -> None:
    """Kill a rank of the newest start; then wait for the next one."""
    before = len([e for e in events(root) if "size" in e and e["rank"] == 0])
    alive = [e["pid"] for e in events(root) if "pid" in e and Path(f"/proc/{e['pid']}").exists()]
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(alive), signal.SIGKILL)
    wait_for(root, lambda log: len([e for e in log if "size" in e and e["rank"] == 0]) > before)


def judge(root: Path) -> list[str]:
    """List what is wrong with a run: batches that were skipped, steps that were lost, and another end."""
    wrong, runs = [], [steps for steps in starts(root) if steps]
    for one, next_one in itertools.pairwise(runs):
        if not one[-1] + 1 - 2 * COPIES <= next_one[0] <= one[-1] + 1:
            wrong.append(f"a start after step {one[-1]} goes on with step {next_one[0]}")
    if any(steps != [*range(steps[0], steps[-1] + 1)] for steps in runs):
        wrong.append(f"steps are not one after the other: {runs}")
    end, expected = torch.load(root / "end.pt"), final(runs[-1][-1] + 1)
    for name, x in expected.items():
        if not torch.allclose(end[name], x, rtol=1e-12, atol=1e-12):
            wrong.append(f"leaf {name} is off by {(end[name] - x).abs().max().item():.3g}")
    return wrong
