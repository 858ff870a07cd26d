"""Kill, starve and damage a run on real processes, start it again, and count what was lost.

    python -m tests.faults --cycles 1000 [--seconds 600] [--seed 0] [--only "link cut"] [--json]

Each cycle draws the number of processes, the stage, and what goes wrong. A cycle is wrong if the run resumes with other
bits than were saved, or before the newest whole checkpoint that was committed, or hangs. Exits with 1 if any did.

One cycle in `RARE` is a fault of hosts, or of the link between them (`tests.faults.on_hosts`). It is wrong if a rank
that lives does not name a lost rank in time, or blames a slow one. Now and then it is an elastic run under torchrun
(`tests.faults.elastic_runs`), which is wrong if it does not end as an uninterrupted one. Where a machine lacks what a
fault needs, that fault is left out, and the command says so.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.distributed.launch import free_port, rank_variables
from tests.faults import disks, elastic_runs, on_hosts
from tests.faults.hosts import missing
from tests.faults.trainer import EVERY, Fault, Start, train

KINDS = (
    "killed",
    "killed in a save",
    "disk full",
    "disk full by a limit",
    "a flipped bit",
    "slow rank",
    "a rank raises",
    "out of memory",
    "disk read-only",
    "slow disk",
    "clock stepped",
)
SOON = ("killed", "a flipped bit", "slow rank", "clock stepped")  # a kill at any moment ends these
RARE = 10  # one cycle in so many is a fault of hosts, which takes as long as ten others
PATIENCE = 40.0  # seconds in which each rank that lives has named a lost rank
HANGS = 40.0  # seconds without any news
FORK = multiprocessing.get_context("fork")


def draw(rng: random.Random, kind: str) -> Start:
    simulated = rng.choice((0, 0, 0, 3))
    processes = 1 if simulated else rng.choice((1, 2, 2, 3))
    fault = Fault(kind, rng.randrange(processes), rng.randrange(1, 4), rng.randrange(7))
    return Start(processes, simulated, rng.randrange(4), rng.random() < 0.7, 10**6, fault)


def child(rank: int, port: int, start: Start, root: Path) -> None:
    """Be a rank."""
    os.setsid()
    out = os.open(root / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.filterwarnings("ignore")
    variables = {} if start.simulated else rank_variables(rank, start.processes, port)
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    code = 1
    try:
        end = train(start, root)
        (root / f"end.{rank}").write_text(end)
        code = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    os._exit(code)


def world(start: Start, root: Path) -> list[Any]:
    port = free_port()
    ranks = [FORK.Process(target=child, args=(r, port, start, root)) for r in range(start.processes)]
    for rank in ranks:
        rank.start()
    return ranks


def news(root: Path) -> list[dict[str, Any]]:
    results = []
    for line in (root / "log").read_text().splitlines() if (root / "log").exists() else []:
        with contextlib.suppress(ValueError):  # rank 0 was killed in the middle of a line
            results.append(json.loads(line))
    return results


def run(start: Start, root: Path, rng: random.Random, event_count: int) -> bool:
    """Run a world until a rank has ended, and end the others, as torchrun does; return whether it hung."""
    ranks, first, last, count = world(start, root), 0.0, time.monotonic(), event_count
    limit = rng.uniform(0.1, 1.0) if start.fault.kind in SOON else 1.5
    hung = is_broken = False
    while all(r.is_alive() for r in ranks) and not hung:
        time.sleep(0.01)
        now = len(news(root))
        if now != count:
            first, last, count = first or time.monotonic(), time.monotonic(), now
        if first and start.fault.kind in disks.KINDS and time.monotonic() > first + limit / 3 and not is_broken:
            disks.strike(root / "run", start.fault.kind)
            is_broken = True
        if first and time.monotonic() > first + limit:
            os.kill(rng.choice(ranks).pid, signal.SIGKILL)
            break
        hung = time.monotonic() > last + HANGS
    end = time.monotonic() + 0.05
    while any(r.is_alive() for r in ranks) and time.monotonic() < end:
        time.sleep(0.005)
    for r in ranks:
        r.kill()
        r.join()
    if is_broken:
        disks.repair(root / "run")
    return hung


def flip_a_bit(root: Path, rng: random.Random) -> int | None:
    """Damage the newest checkpoint; return its step."""
    steps = sorted(p for p in (root / "run").glob("step-*") if (p / "manifest.json").exists())
    if not steps:
        return None
    file = rng.choice([p for p in steps[-1].iterdir() if p.stat().st_size])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return int(steps[-1].name.removeprefix("step-"))


class Tally:
    """The counts of what happened, and of what should not have."""

    def __init__(self) -> None:
        self.digests: dict[int, set[str]] = {}
        self.committed: set[int] = set()
        self.reached = 0
        self.wrong: list[str] = []
        self.again: list[int] = []

    def take(self, events: list[dict[str, Any]], what: str) -> None:
        for e in events:
            newest = max(self.committed, default=0)
            if e["event"] == "saving":
                self.digests.setdefault(e["step"], set()).add(e["digest"])
            elif e["event"] == "committed" and e["step"]:
                self.committed.add(e["step"])
            elif e["event"] == "step":
                self.reached = e["step"]
            elif e["event"] == "fresh" and newest:
                self.wrong.append(f"{what}: began anew, and step {newest} was committed")
            elif e["event"] == "resumed":
                if e["digest"] not in self.digests.get(e["step"], ()):
                    self.wrong.append(f"{what}: other bits at step {e['step']}")
                if e["step"] < newest:
                    self.wrong.append(f"{what}: went back to step {e['step']} from {newest}")
                self.again.append(self.reached - e["step"])
                self.committed = {n for n in self.committed if n <= e["step"]} | {e["step"]}


class HostTally:
    """The results of the faults of hosts, and of elastic runs."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {}
        self.wrong: list[str] = []

    def run(self, kind: str, rng: random.Random) -> None:
        if kind in elastic_runs.KINDS:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.wrong += elastic_runs.run(kind, rng)
            return
        case = on_hosts.draw(rng, kind)
        run = on_hosts.run_case(case, PATIENCE)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.seconds.setdefault(kind, []).extend([] if run.seconds is None else [run.seconds])
        self.wrong += [f"{case}: {line}" for line in run.wrong]

    def longest(self) -> dict[str, float]:
        return {kind: round(max(seconds), 1) for kind, seconds in self.seconds.items() if seconds}


def same_end(root: Path, rng: random.Random, kills: int) -> bool:
    """Return whether 30 steps on 2 processes end with the same bits with some kills and without any."""
    ends = []
    for name, n in (("without", 0), ("with", kills)):
        (root / name).mkdir()
        for k in range(n):
            fault = Fault("killed in a save", k % 2, 2, rng.randrange(6))
            run(Start(2, 0, 3, True, 30, fault), root / name, random.Random(k), len(news(root / name)))
        ranks = world(Start(2, 0, 3, True, 30, Fault("none")), root / name)
        for r in ranks:
            r.join(60)
        files = [root / name / f"end.{r}" for r in range(2)]
        ends.append([f.read_text() if f.exists() else f"no end of {f}" for f in files])
    return ends[0] == ends[1] and len(set(ends[0])) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cycle after them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print what was counted, for programs")
    args = parser.parse_args()
    rng, tally, begin = random.Random(args.seed), Tally(), time.monotonic()
    lacks, lacks_disk, on_host = missing(), disks.no_disk(), HostTally()
    left_out = {kind: lacks_disk for kind in disks.KINDS if lacks_disk}
    left_out |= {
        kind: lacks or lacks_disk for kind in on_hosts.KINDS if lacks or (lacks_disk and kind in on_hosts.DISKS)
    }
    kinds = [kind for kind in (*KINDS, *disks.KINDS) if args.only in kind and kind not in left_out]
    host_kinds = [kind for kind in on_hosts.KINDS if args.only in kind and kind not in left_out]
    host_kinds += [kind for kind in elastic_runs.KINDS if args.only in kind]
    counts, hangs, cycles = dict.fromkeys(kinds, 0), 0, []
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    own_disk = contextlib.ExitStack()
    own_disk.enter_context(disks.disk(root / "run"))
    for i in track(range(args.cycles), "faults", disable=args.json, console=Console(stderr=True)):
        if time.monotonic() - begin > args.seconds:
            break
        first = [*kinds, *host_kinds]
        is_rare = bool(host_kinds) and (not kinds or rng.randrange(RARE) == 0)
        kind = first[i] if i < len(first) else rng.choice(host_kinds if is_rare else kinds)
        if kind in host_kinds:
            on_host.run(kind, rng)
            continue
        start, event_count, t = draw(rng, kind), len(news(root)), time.monotonic()
        if kind == "a flipped bit" and (damaged := flip_a_bit(root, rng)) is not None:
            tally.committed.discard(damaged)
        hangs += run(start, root, rng, event_count)
        tally.take(news(root)[event_count:], f"cycle {i}, {start}")
        counts[kind] += 1
        cycles.append(time.monotonic() - t)
    same = same_end(root, rng, 3) if kinds else True
    results = {
        "cycles": len(cycles),
        "faults": counts,
        "hangs": hangs,
        "wrong": tally.wrong,
        "reached": tally.reached,
        "saves": len(tally.digests),
        "resumed": len(tally.again),
        "done again": [statistics.median(tally.again or [0]), max(tally.again, default=0)],
        "seconds": [
            round(time.monotonic() - begin, 1),
            *[round(f(cycles or [0]), 2) for f in (statistics.median, max)],
        ],
        "bitwise": same,
        "hosts": on_host.counts,
        "hosts wrong": on_host.wrong,
        "hosts seconds": on_host.longest(),
        "left out": left_out,
    }
    failed = bool(hangs or tally.wrong or not same or on_host.wrong) or len(tally.again) < len(cycles) // 2
    if args.json:
        print(json.dumps(results))
    else:
        show(results)
        print((root / "errors").read_text()[-3000:] if failed and kinds else "", end="")
    if failed:
        shutil.copytree(root / "run", root / "kept")
    own_disk.close()
    if not failed:
        shutil.rmtree(root)
    return int(failed)


def show(actual: dict[str, Any]) -> None:
    table = Table("fault", "cycles")
    for kind, n in actual["faults"].items():
        table.add_row(kind, str(n))
    console = Console()
    console.print(table)
    hosts = Table("fault of hosts, or of an elastic run", "cycles", "named after at most, s")
    for kind, n in actual["hosts"].items():
        hosts.add_row(kind, str(n), str(actual["hosts seconds"].get(kind, "not lost")))
    console.print(hosts)
    for lack in dict.fromkeys(actual["left out"].values()):
        names = ", ".join([kind for kind, x in actual["left out"].items() if x == lack])
        console.print(f"Left out, since this machine lacks {lack}: {names}.")
    total, median, most = actual["seconds"]
    again, worst = actual["done again"]
    console.print(
        f"{actual['cycles']} cycles in {total:.0f} s ({median} s each, at most {most}): {actual['hangs']} hangs, "
        f"{len(actual['wrong'])} wrong resumes of {actual['resumed']}; step {actual['reached']} reached; {again:g} "
        f"steps done again (median; at most {worst}, a save is each {EVERY} steps).\n"
        f"30 steps with 3 kills are those without, bit for bit: {actual['bitwise']}."
    )
    for line in [*actual["wrong"], *actual["hosts wrong"]][:20]:
        console.print(line, style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
