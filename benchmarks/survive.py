"""Measure how long it takes from a fault of a host, a link or a rank to the error that names it, and what that costs.

python benchmarks/survive.py [--timeout 300] [--at-once 8] [--steps 40] [--write]

Two hosts are network namespaces, and the link between them is a thread (`tests/faults/hosts.py`); that needs root. Each
fault strikes two ranks on each host once, with the timeout of `fzero.mesh`. The cost is that of a step between two
ranks of one host, in worlds with and without heartbeats, in turns.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.report import publish, quartiles, table
from tests.distributed.launch import environment, world
from tests.faults.hosts import missing
from tests.faults.on_hosts import HARMLESS, KINDS, Case, run_case

ROOT = pathlib.Path(__file__).parents[1]
GOAL = 60.0  # seconds to the error that names a lost rank
ROUNDS = 6
COST = """
import statistics, sys, time, torch, fzero
from fzero import optim
torch.set_num_threads(1)
mesh = fzero.mesh(dp=-1, timeout=None if sys.argv[1] == "None" else float(sys.argv[1]))
opt = optim.sgd(0.1)

def loss_fn(params, x):
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"])
    return x.square().mean()

def train_step(params, opt_state, x):
    loss, grads = fzero.value_and_grad(loss_fn)(params, x)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss

step = fzero.shard(train_step, stage=3, mesh=mesh, check=False)
blocks = [{"w": torch.eye(64) / 99} for _ in range(8)]
params, opt_state = step.init({"blocks": blocks}, opt)
step = fzero.jit(step, backend="fx") if sys.argv[2] == "jitted" else step
batch = mesh.split(torch.ones(8, 64))
for _ in range(20):
    params, opt_state, _ = step(params, opt_state, batch)
from fzero._liveness import current_heartbeat
heartbeat, times, cpu, begin = current_heartbeat(), [], time.process_time(), time.perf_counter()

def heartbeat_seconds():
    if heartbeat is None:
        return 0.0
    fields = open(f"/proc/{heartbeat._process.pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100

before = heartbeat_seconds()
for _ in range(int(sys.argv[3]) // 10):
    start = time.perf_counter()
    for _ in range(10):
        params, opt_state, _ = step(params, opt_state, batch)
    times.append((time.perf_counter() - start) / 10)
cpu = (time.process_time() - cpu) / int(sys.argv[3])
if mesh.rank == 0:
    print(statistics.median(times), cpu, (heartbeat_seconds() - before) / (time.perf_counter() - begin))
"""
COPIES = """
import os, pathlib, sys, tempfile, time, torch, fzero
from fzero import optim
from fzero.checkpoint import _shared_memory
torch.set_num_threads(1)
mesh, every, rounds = fzero.mesh(dp=-1), int(sys.argv[1]), int(sys.argv[2])
_shared_memory._host_name = lambda: f"host-{mesh.rank}"  # so that a copy is sent, though here over the loopback
opt = optim.adamw(1e-3)

def loss_fn(params, x):
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"]) @ block["v"]
    return x.square().mean()

def train_step(params, opt_state, x):
    loss, grads = fzero.value_and_grad(loss_fn)(params, x)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss

step = fzero.shard(train_step, stage=3, mesh=mesh, check=False)
blocks = [{"w": torch.randn(512, 2048) / 99, "v": torch.randn(2048, 512) / 99} for _ in range(8)]
state = step.init({"blocks": blocks}, opt)
step = fzero.jit(step, backend="fx")
batch = mesh.split(torch.ones(2 * int(sys.argv[3]), 512))
root = pathlib.Path(sys.argv[4])
runs = fzero.checkpoint.checkpoints(root / "disk", mesh, memory="/dev/shm")
times, cpu, pauses = {False: [], True: []}, {False: [], True: []}, []

def segment(copied):
    global state
    begin, used = time.perf_counter(), time.process_time()
    for i in range(every):
        *state, _ = step(*state, batch)
        state = tuple(state)
        if copied and i == 0:
            start = time.perf_counter()
            runs.save_in_memory(i, state)
            pauses.append(time.perf_counter() - start)
    runs.wait()
    times[copied].append((time.perf_counter() - begin) / every)
    cpu[copied].append((time.process_time() - used) / every)

segment(True), segment(False)
times, cpu, pauses = {False: [], True: []}, {False: [], True: []}, []
for i in range(rounds):
    for copied in (False, True) if i % 2 == 0 else (True, False):
        segment(copied)
if mesh.rank == 0:
    mine = sum(x.nbytes for x in fzero.tree.tensors(state))
    print(*times[False], *times[True], *cpu[False], *cpu[True], *pauses, mine)
"""
DISK = """
import json, os, pathlib, signal, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
root, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])

def say(**what):
    with open(root / "log", "a") as f:
        f.write(json.dumps({"time": time.time(), "rank": rank, **what}) + "\\n")

torch.set_num_threads(1)
say(start=True)
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
opt, begin, file = torch.optim.AdamW(net.parameters()), 0, root / "checkpoint.pt"
if file.exists():
    saved = torch.load(file)
    net.load_state_dict(saved["net"]), opt.load_state_dict(saved["opt"])
    begin = saved["step"]
model = DistributedDataParallel(net)
for i in range(begin, 8):
    if rank == 1 and i == 5 and not (root / "died").exists():
        (root / "died").touch()
        say(died=i)
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(6, 5).double()).square().mean().backward()
    opt.step(), opt.zero_grad()
    say(step=i)
    if i % 2 and rank == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "step": i + 1}, root / "new")
        (root / "new").rename(file)
"""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # else torch's own restart meets an address of the dead
PLACE = """
import tempfile, timeit
from fzero._liveness._beats import HeartbeatConfig
from fzero._liveness._heartbeat_client import HeartbeatClient
heartbeat = HeartbeatClient(HeartbeatConfig(0, 2, "h", "t", "localhost", 0, 60.0, 300.0, 0), None)
n = 100_000
print(min(timeit.repeat(lambda: heartbeat.publish("all_gather at train.py:31", True), number=n, repeat=5)) / n)
"""


def in_a_process(kind: str, timeout: float) -> dict[str, Any]:
    """Run one case in a process of its own, since it forks."""
    command = [sys.executable, __file__, "--timeout", str(timeout), "--case", kind]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        return {"wrong": [done.stderr[-1000:]], "seconds": None, "error": ""}
    return json.loads(done.stdout)


def case(kind: str, timeout: float) -> dict[str, Any]:
    ranks = 1 if kind == "2 s delay" else 2
    run = run_case(Case(kind, ranks, timeout=timeout), patience=2 * timeout)
    error = next((o.text for o in run.outcomes if o.lost is not None), "")
    return {"wrong": run.wrong, "seconds": run.seconds, "error": error.partition("; last seen")[0]}


def faults(timeout: float, at_once: int) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = dict(zip(KINDS, pool.map(lambda kind: in_a_process(kind, timeout), KINDS), strict=True))
    rows = []
    for kind, what in outcomes.items():
        seconds = what["seconds"]
        met = "met" if seconds is None else "met" if seconds <= GOAL else "missed"
        shown = "not lost, all go on" if kind in HARMLESS else f"{seconds:.1f}" if seconds is not None else "none"
        rows.append([kind, shown, "**wrong**" if what["wrong"] else met, what["error"].partition("is lost: ")[2]])
    wrong = [f"`{kind}`: {' '.join(what['wrong'])[:500]}" for kind, what in outcomes.items() if what["wrong"]]
    return [
        f"From the fault to the `LostRankError` of the last rank that lives, with `fzero.mesh(timeout={timeout:g})`. "
        f"Two ranks on each host, {at_once} worlds at once on this machine.",
        table(["fault", "seconds", f"goal: ≤ {GOAL:g} s", "the error says"], rows),
        *wrong,
    ]


def cost(timeout: float, steps: int) -> list[str]:
    rows, shares = [], list[float]()
    for how in ("eager", "jitted"):
        times: dict[str, list[list[float]]] = {"None": [], str(timeout): []}
        for i in range(ROUNDS):
            # the first of two is faster here, so the order turns around each time
            for argument, samples in list(times.items())[:: 1 if i % 2 else -1]:
                done = world(2, "-c", COST, argument, how, str(steps))
                samples.append([float(x) for x in done.stdout.split()])
        for i, what in enumerate(("by the clock", "of the processor")):
            without, with_beats = [[1e3 * x[i] for x in samples] for samples in times.values()]
            ratio = statistics.median(with_beats) / statistics.median(without)
            rows.append([f"{how}, {what}", quartiles(without), quartiles(with_beats), f"{ratio:.3f}"])
        shares += [x[2] for x in times[str(timeout)]]
    command = [sys.executable, "-c", PLACE]
    place = float(
        subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout
    )
    return [
        "The table has milliseconds of a step of 8 small units at stage 3 between two ranks. It shows the median and "
        f"the quartiles of {ROUNDS} worlds of {steps} steps, with and without heartbeats in turns.",
        table(["step", "timeout=None", f"timeout={timeout:g}", "ratio of medians"], rows),
        f"To publish a place takes {1e6 * place:.2f} microseconds, twice a wait for a collective. The heartbeat's own "
        f"process takes {100 * statistics.median(shares):.2f}% of a core.",
    ]


def copies(every: int, rounds: int, rows: int) -> list[str]:
    """Measure what it costs to save the state in memory each `every` steps, in turns with steps without that."""
    with tempfile.TemporaryDirectory() as folder:
        done = world(2, "-c", COPIES, str(every), str(rounds), str(rows), folder)
    for path in pathlib.Path("/dev/shm/fzero").glob("host-[01]"):
        shutil.rmtree(path)
    numbers = [float(x) for x in done.stdout.split()]
    clock, clock_copied, cpu, cpu_copied, pauses = [numbers[i * rounds : (i + 1) * rounds] for i in range(5)]
    lines = []
    for what, without, copied in (("by the clock", clock, clock_copied), ("of the processor", cpu, cpu_copied)):
        ratio = statistics.median(copied) / statistics.median(without)
        lines.append([f"a step, {what}", quartiles(without), quartiles(copied), f"{ratio:.3f}"])
    return [
        f"A step of 16.8 million parameters with AdamW at stage 3 between two ranks, {rows} rows each, jitted. "
        f"Seconds: the median and the quartiles of {rounds} times {every} steps each, in turns. Each rank saves "
        f"its {numbers[-1] / 1e6:.0f} MB once in {every} steps, and sends them to the other.",
        table(["", "not saved", f"saved in memory each {every} steps", "ratio of medians"], lines),
        f"`save_in_memory` returned after {quartiles(pauses)} seconds; the rest runs beside the steps.",
    ]


def going_on(times: int) -> list[str]:
    """Measure from the death of a rank to the next step: elastic runs from memory, and torch's DDP from disk."""
    whats = ("the script begins again", "the first step ends", "steps done again")
    systems = {"fzero.elastic, from memory": elastic_words, "torch's DDP, from disk": disk_words}
    figures = {name: {what: list[float]() for what in whats} for name in systems}
    for i in range(times):
        for name, words_of in [*systems.items()][:: 1 if i % 2 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                words = [*command, "--max-restarts=3", *words_of(folder)]
                subprocess.run(words, cwd=ROOT, env=environment(**OWN_STORE), capture_output=True, check=True)
                lines = [json.loads(line) for line in (pathlib.Path(folder) / "log").read_text().splitlines()]
            for what, value in zip(whats, until_next(lines), strict=True):
                figures[name][what].append(value)
    rows = [[name, *[quartiles(x[what]) for what in whats[:2]], f"{max(x[whats[2]]):g}"] for name, x in figures.items()]
    return [
        "Two ranks of one host under torchrun, of which one is killed in its step 5; a small model, kept each 2 steps, "
        f"in memory or in a file. From the death, in seconds: the median and the quartiles of {times}, in turns.",
        table(["", *whats[:2], "steps done again, at most"], rows),
    ]


def elastic_words(folder: str) -> list[str]:
    return ["-m", "tests.elastic.on_processes", folder, "--dies", "1:forward:5"]


def disk_words(folder: str) -> list[str]:
    script = pathlib.Path(folder) / "train.py"
    script.write_text(DISK)
    return [str(script), folder]


def until_next(lines: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds from a death to the next start and to the next step, and how many steps were done again."""
    died = next(i for i, line in enumerate(lines) if "died" in line)
    start = next(line for line in lines[died:] if "start" in line)
    step = next(line for line in lines[died + 1 :] if "step" in line and line["time"] > start["time"])
    last = max(line["step"] for line in lines[:died] if "step" in line)
    return start["time"] - lines[died]["time"], step["time"] - lines[died]["time"], last + 1 - step["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--case", help="run this fault alone, and print what came of it as JSON")
    parser.add_argument("--copies", type=int, help="only what it costs to save the state in memory, each so many steps")
    parser.add_argument("--going-on", type=int, help="only how long a killed rank takes, so many times")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.case, args.timeout)))
        return
    if args.going_on:
        publish(__file__, f"python benchmarks/survive.py --going-on {args.going_on}", going_on(args.going_on), False)
        return
    if args.copies:
        publish(__file__, f"python benchmarks/survive.py --copies {args.copies}", copies(args.copies, 6, 256), False)
        return
    if lacks := missing():
        sys.exit(f"hosts need {lacks}, which this machine lacks")
    start = time.monotonic()
    parts = [*faults(args.timeout, args.at_once), *cost(args.timeout, args.steps), *copies(10, 6, 256), *going_on(5)]
    parts.append(f"All of this took {(time.monotonic() - start) / 60:.0f} minutes.")
    publish(__file__, "python benchmarks/survive.py", parts, args.write)


if __name__ == "__main__":
    main()
